"""What pack hands to autograd for a tensor that stays on the device: the tensor, and the version it had.

A leaf is held itself: it may be swapped under us (FSDP, ZeRO-3), and then the new content is meant. A non-leaf is held
as detach(): holding an output itself would keep its graph alive for ever if that dies without a backward. A bare tuple,
since nothing is packed as often and nothing is made as fast.
"""

from __future__ import annotations

import torch

from vdnn.runtime.torch_internals.version_counter import raise_modified

KeptTensor = tuple[torch.Tensor, int]


def keep_tensor(tensor: torch.Tensor) -> KeptTensor:
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


def kept_tensor(kept: KeptTensor) -> torch.Tensor:
    tensor, version = kept
    if tensor._version != version:
        sizes = tensor._nested_tensor_size().tolist() if _is_nested_strided(tensor) else tensor.shape
        raise_modified(tensor.type(), tuple(sizes), tensor._version, version)
    return tensor


def _is_nested_strided(tensor: torch.Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided
