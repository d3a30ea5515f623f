"""The packed form of a tensor that stays on the device: the tensor, and its version at the save.

A leaf is held itself: FSDP or ZeRO-3 may swap its data, and the backward pass needs the new content. A non-leaf is held
as detach(): a reference to the output itself would keep its graph alive for ever if no backward pass runs. The packed
form is a bare tuple, because this is the most frequent case and nothing is made faster.
"""

from __future__ import annotations

from typing import Any

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.torch_internals.version_counter import raise_modified

KeptTensor = tuple[torch.Tensor, int]


def pack_kept(tensor: torch.Tensor) -> KeptTensor:
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


def unpack_kept(kept: KeptTensor) -> torch.Tensor:
    tensor, version = kept
    if tensor._version != version:
        sizes = tensor._nested_tensor_size().tolist() if _is_nested_strided(tensor) else tensor.shape
        raise_modified(tensor.type(), tuple(sizes), tensor._version, version)
    return tensor


def unpack_without_hooks(packed: Any) -> torch.Tensor:
    """Unpacks whatever the pack hook returned, in a process or a place where the unpack hook does not run."""
    if isinstance(packed, tuple):
        return unpack_kept(packed)
    if isinstance(packed, KeptSave):
        kept = packed.tensor
        return unpack_kept((kept, packed.version)) if isinstance(kept, torch.Tensor) else unpack_without_hooks(kept)
    tensor: torch.Tensor = (packed.full() if isinstance(packed, LightSave) else packed).unpack()
    return tensor


def _is_nested_strided(tensor: torch.Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided
