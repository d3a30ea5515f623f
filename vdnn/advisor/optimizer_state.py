"""OptimizerForm: how an optimizer updates its parameters, and the bytes of its state, now and in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Neither library quantizes state with fewer elements. There is one float32 scale for each 256 elements.
_SMALLEST_QUANTIZED = 4096
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """How an optimizer updates its parameters. `can_fuse` is True if torch has a fused kernel for it."""

    name: str
    parameters: int
    state_bytes: int
    bytes_in_8_bits: int
    can_fuse: bool
    is_fused: bool
    is_loop: bool


def form_of(optimizer: torch.optim.Optimizer) -> OptimizerForm:
    groups = optimizer.param_groups
    parameters = [one for group in groups for one in group["params"]]
    state_bytes = small_bytes = 0
    for parameter, held in optimizer.state.items():
        for tensor in held.values():
            if not isinstance(tensor, torch.Tensor):
                continue
            nbytes = tensor.numel() * tensor.itemsize
            state_bytes += nbytes
            quantized = tensor.shape == parameter.shape and tensor.numel() >= _SMALLEST_QUANTIZED
            small_bytes += tensor.numel() + 4 * -(-tensor.numel() // _BLOCK) if quantized else nbytes
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    return OptimizerForm(
        name=type(optimizer).__name__,
        parameters=len(parameters),
        state_bytes=state_bytes,
        bytes_in_8_bits=small_bytes,
        can_fuse=of_torch and all("fused" in group and not group.get("differentiable") for group in groups),
        is_fused=any(bool(group.get("fused")) for group in groups),
        is_loop=of_torch and any(group.get("foreach") is False and not group.get("fused") for group in groups),
    )
