"""AdamW as fused kernels run it: one pass over parameters, gradients and state, without temporary memory.

The moments are in the parameters' type, or in 8 bits with a scale for every 256 values, as in bitsandbytes and torchao.
Paged, they are managed memory, which torch does not count: paging_ns() is what it costs to page them in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vdnn.hardware import HardwareProfile

_VALUES_OF_A_SCALE = 256


class OnePassAdamW(torch.optim.Optimizer):
    """For rehearsals: each step touches the bytes that a fused AdamW reads and writes, and computes nothing of use.
    Without `counts_state`, torch does not see the state."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        in_8_bits: bool = False,
        counts_state: bool = True,
    ) -> None:
        super().__init__(parameters, {})
        for parameter in self._parameters() if counts_state else ():
            dtype = torch.uint8 if in_8_bits else parameter.dtype
            self.state[parameter] = {name: torch.empty_like(parameter, dtype=dtype) for name in ("first", "second")}
            if in_8_bits:
                scales = 2 * -(-parameter.numel() // _VALUES_OF_A_SCALE)
                self.state[parameter]["scales"] = torch.empty(scales, dtype=torch.float32)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self.step_of(parameter)

    @torch.no_grad()
    def step_of(self, parameter: torch.nn.Parameter) -> None:
        parameter.add_(parameter.grad)  # type: ignore[arg-type]
        for moment in self.state[parameter].values():
            moment.add_(1)


def paging_ns(profile: HardwareProfile, parameters: int) -> int:
    """The time to page in and out two bytes of each parameter, one direction after the other."""
    rates = profile.to_device_bytes_per_s, profile.to_host_bytes_per_s
    return sum(round(2 * parameters / rate * 1e9) for rate in rates)


def steps_in_backward(optimizer: OnePassAdamW, model: torch.nn.Module) -> None:
    """Each parameter steps as soon as its gradient is there, and its gradient is released."""

    def step(parameter: torch.nn.Parameter) -> None:
        optimizer.step_of(parameter)
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
