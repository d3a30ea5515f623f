"""The geometry of a saved tensor, and the label under which reports and errors name it."""

from __future__ import annotations

import torch

Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # dtype, size, stride


def label_text(geometry: Geometry | None, saved_in: type | None) -> str:
    """Names a saved tensor in a report or an error; `saved_in` is the class of the module that saved it."""
    if geometry is None:
        return "a storage"
    dtype, shape, _ = geometry
    place = "no module" if saved_in is None else saved_in.__name__
    return f"{str(dtype).removeprefix('torch.')} {[*shape]} saved in {place}"
