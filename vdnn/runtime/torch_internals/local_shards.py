"""Makes a DTensor around another local part, and finds FSDP2's own CPU offload.

DTensor.from_local copies a local part to the device of its mesh. A DTensor whose local part is on the host, while its
mesh is of GPUs, is what FSDP2 itself makes for CPUOffloadPolicy; torch.distributed.checkpoint saves and loads it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def with_local_part(whole: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like `whole` whose local part is `local` itself, on whatever device."""
    return type(whole)(local, whole._spec, requires_grad=False)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # importing it takes a second
    return tensors is not None and type(tensor) is tensors.DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, and any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def has_layout_of(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """True for two DTensors that are divided alike, and for two other tensors."""
    if is_sharded(tensor) != is_sharded(parameter):
        return False
    return not is_sharded(tensor) or bool(tensor._spec == parameter._spec)  # type: ignore[attr-defined]


def is_offloaded_by_fsdp(parameter: torch.Tensor) -> bool:
    """True for a DTensor that is not on the device of its mesh."""
    tensors = sys.modules.get("torch.distributed.tensor")  # importing it takes a second
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return False
    return bool(parameter.device_mesh.device_type != parameter._local_tensor.device.type)


def has_fsdp_cpu_offload(model: torch.nn.Module) -> bool:
    """True if fully_shard was given a CPUOffloadPolicy for any part of `model`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            if any(isinstance(getattr(one, "offload_policy", None), fsdp.CPUOffloadPolicy) for one in groups):
                return True
    return False
