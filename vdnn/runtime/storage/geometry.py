"""The geometry of a saved tensor, and the label that reports and errors use for it."""

from __future__ import annotations

import torch

Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # dtype, size, stride


def label_text(geometry: Geometry | None, saved_in: type | None) -> str:
    """The label of a saved tensor. `saved_in` is the class of the module that saved it."""
    if geometry is None:
        return "a storage"
    dtype, shape, _ = geometry
    module = "no module" if saved_in is None else saved_in.__name__
    return f"{str(dtype).removeprefix('torch.')} {[*shape]} saved in {module}"
