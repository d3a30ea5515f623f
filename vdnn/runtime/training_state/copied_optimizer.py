"""copy.deepcopy of an optimizer whose state is on the host: the copy is plain, with its state on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import torch

from vdnn.runtime.training_state.state_tensors import places_in


def copy_of(
    optimizer: torch.optim.Optimizer,
    memo: dict[int, Any],
    on_host: Container[int],
    to_device: Callable[[torch.Tensor, torch.device], torch.Tensor],
) -> torch.optim.Optimizer:
    """What copy.deepcopy makes, but for the tensors whose ids are in `on_host`: `to_device` makes theirs."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    for parameter, state in optimizer.state.items():
        for place in places_in(state):
            if id(place.tensor) in on_host:
                memo[id(place.tensor)] = to_device(place.tensor, parameter.device)
    made.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
    return made
