"""Says which part of a gradient leaves: all of it, or the local part if it is a DTensor.

FSDP2 reduces the gradients of a module into one storage, of which each is a view. Such a view is copied on the device
first, since a copy to the host takes whole storages. The storage is released when the last of its gradients has left.
"""

from __future__ import annotations

import torch

from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.torch_internals.local_shards import (
    has_layout_of,
    is_offloaded_by_fsdp,
    is_sharded,
    local_part,
    with_local_part,
)
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, plain_part
from vdnn.runtime.training_state.state_tensors import has_lazy_bits, is_dense, is_whole


def is_local_shard(parameter: torch.Tensor) -> bool:
    """True for a DTensor whose local part is plain memory of the device of its mesh."""
    return is_sharded(parameter) and plain_part(parameter) is not None and not is_offloaded_by_fsdp(parameter)


def may_leave(parameter: torch.Tensor, device: torch.device, min_bytes: int) -> bool:
    """True if the parameter has a gradient on `device` that may leave. The gradient of a DTensor must be divided as
    that is."""
    gradient = native_gradient(parameter)
    if gradient is None or not has_layout_of(gradient, parameter):
        return False
    local = local_part(gradient)
    is_alone = _is_plain_part(local, device) if is_sharded(gradient) else is_whole(local, device)
    return is_alone and local.nbytes >= min_bytes


def _is_plain_part(tensor: torch.Tensor, device: torch.device) -> bool:
    is_there = tensor.device == device and has_plain_storage(tensor) and not tensor.requires_grad
    return is_there and tensor.dim() > 0 and tensor.nbytes > 0 and not has_lazy_bits(tensor) and is_dense(tensor)


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient, or its local part, in a storage of its own."""
    gradient = native_gradient(parameter)
    if gradient is None:
        raise RuntimeError("expected the gradient that may leave, got none")
    local = local_part(gradient)
    return local if is_whole(local, local.device) else local.clone(memory_format=torch.preserve_format)


def like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` itself, or a DTensor around it if the parameter is one."""
    return with_local_part(parameter, gradient) if is_sharded(parameter) else gradient  # type: ignore[arg-type]
