"""Divides the parameters of an optimizer into slices, which are stepped one after another.

A slice has whole parameters, in the order of the groups, so that every optimizer that updates a parameter from that
parameter alone computes the same bits: elementwise ones, and those of whole matrices (Muon, Adafactor, Shampoo). Some
decisions of torch's optimizers are made once for a group: whether `foreach` runs depends on the classes of all its
tensors and on sparse gradients. A group that mixes them is one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vdnn.runtime.torch_internals.parameter_guard import is_guarded
from vdnn.runtime.training_state.away_gradients import gradient_anywhere
from vdnn.runtime.training_state.homes import device_of

Group = dict[str, Any]


@dataclass(slots=True)
class Slice:
    """The parameters of one slice, by index of their group, all on one device."""

    device: torch.device | None  # None: groups without parameters
    parameters: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    nbytes: int = 0  # of state that moves

    def add(self, group: int, parameters: list[torch.Tensor], nbytes: int) -> None:
        self.parameters.setdefault(group, []).extend(parameters)
        self.nbytes += nbytes

    def all_parameters(self) -> list[torch.Tensor]:
        return [parameter for parameters in self.parameters.values() for parameter in parameters]


def options_of(group: Group) -> dict[str, Any]:
    """Returns the settings of a group: all but its parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def slices_of(groups: list[Group], nbytes_of: Callable[[torch.Tensor], int], limit_bytes: int) -> list[Slice]:
    """Slices of at most `limit_bytes` of state each, or of one parameter that has more."""
    slices: list[Slice] = []
    open_on: dict[torch.device, Slice] = {}

    def add(group: int, device: torch.device, parameters: list[torch.Tensor], nbytes: int) -> None:
        into = open_on.get(device)
        if into is None or (into.nbytes and into.nbytes + nbytes > limit_bytes):
            into = open_on[device] = Slice(device)
            slices.append(into)
        into.add(group, parameters, nbytes)

    for index, group in enumerate(groups):
        parameters: list[torch.Tensor] = group["params"]
        if is_one_decision(parameters):
            add(index, device_of(parameters[0]), parameters, sum(map(nbytes_of, parameters)))
            continue
        for parameter in parameters:
            add(index, device_of(parameter), [parameter], nbytes_of(parameter))
        if not parameters:
            slices.append(Slice(None, {index: []}))
    return slices


def slices_in_order(
    parameters: list[tuple[int, torch.Tensor]], nbytes_of: Callable[[torch.Tensor], int], limit_bytes: int
) -> list[Slice]:
    """The same for parameters in the order of their use, each with the index of its group."""
    slices: list[Slice] = []
    open_on: dict[torch.device, Slice] = {}
    for group, parameter in parameters:
        device, nbytes = device_of(parameter), nbytes_of(parameter)
        into = open_on.get(device)
        if into is None or (into.nbytes and into.nbytes + nbytes > limit_bytes):
            into = open_on[device] = Slice(device)
            slices.append(into)
        into.add(group, [parameter], nbytes)
    return slices


def is_one_decision(parameters: list[torch.Tensor]) -> bool:
    """True if torch's optimizers would decide otherwise for a part of these parameters than for all."""
    if len(parameters) < 2:
        return False
    if len({torch.nn.Parameter if is_guarded(one) else type(one) for one in parameters}) > 1:
        return True
    gradients = map(gradient_anywhere, parameters)
    return len({gradient.layout for gradient in gradients if gradient is not None}) > 1
