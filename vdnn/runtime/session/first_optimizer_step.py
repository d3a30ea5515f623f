"""Measures what the first step of an optimizer takes, before any run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from vdnn.runtime.machine.allocation_tracker import AllocationTracker
from vdnn.runtime.torch_internals.random_state import random_state_kept
from vdnn.runtime.training_state.optimizer_copies import copy_without_state, own_step_of
from vdnn.runtime.training_state.slices import options_of


def bytes_of_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int | None:
    """The bytes that the first step of a parameter of this group takes beside it and its gradient: its state and
    temporary results. Runs a step on a parameter without data. None if that is not possible. What torch runs on the
    CPU is counted: a loop takes no less than a grouped step of one parameter."""
    try:
        options = {name: _number_of(value) for name, value in options_of(group).items()}
        with _disable_current_modes():  # FakeTensorMode cannot copy tensors with data, which the optimizer may hold
            none = torch.nn.Parameter(torch.empty(0))
            made = copy_without_state(optimizer, [{**copy.deepcopy(options), "params": [none]}])
        with _disable_current_modes(), random_state_kept(), FakeTensorMode(), AllocationTracker() as tracker:
            alone = torch.nn.Parameter(torch.empty(parameter.size(), dtype=parameter.dtype))
            alone.grad = torch.empty_like(alone)
            made.param_groups[0]["params"] = [alone]
            before_bytes = tracker.live_bytes
            tracker.reset_peak()
            own_step_of(optimizer)(made)
            return tracker.peak_bytes - before_bytes
    except Exception:  # it reads values, or calls what knows no tensors without data
        return None


def _number_of(value: Any) -> Any:
    """The number of a tensor of one element, such as a learning rate, and any other value itself. A step on parameters
    without data takes no tensor with data."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
