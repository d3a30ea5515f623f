"""copy.deepcopy of an optimizer whose state is on the host: the copy is plain, with its state on the device."""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn.runtime.training_state.state_tensors import places_in


def copy_of(
    optimizer: torch.optim.Optimizer,
    memo: dict[int, Any],
    on_host: Container[int],
) -> torch.optim.Optimizer:
    """Does what copy.deepcopy does, but for the tensors whose ids are in `on_host`, which go to the device."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    for parameter, state in optimizer.state.items():
        for place in places_in(state):
            if id(place.tensor) in on_host:
                held = place.tensor if place.whole is None else place.whole
                memo[id(held)] = place.holding(copied_to_device(place.tensor, parameter.device))
    made.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
    return made


def copied_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return tensor if isinstance(host, FakeTensor) else tensor.copy_(host)
