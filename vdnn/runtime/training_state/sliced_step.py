"""Calls an optimizer's own step on a slice of its parameters, as a part of one step.

[Note: One step in parts] The own step sees groups with the parameters of the slice only. A closure is evaluated once,
ahead of the slices. Everything that a step changes beside parameters and their state is set back before each slice, so
that all slices start from the same values: options of a group, such as a count of steps that some optimizers keep
there, numbers that the optimizer object holds, and state under a name, which belongs to no parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.training_state.slices import Group, Slice, options_of

_OF_TORCH = ("state", "param_groups")


class SlicedStep:
    """One step of `optimizer`, of which `own_step` is the unmodified function."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own_step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._optimizer = optimizer
        self._own_step = own_step
        self.has_closure = callable(kwargs.get("closure", args[0] if args else None))
        self._args, self._kwargs, self.loss = _evaluated(args, kwargs)
        # As they are in the call: the program may change the list and its groups before the last slice is stepped.
        self.groups: list[Group] = list(optimizer.param_groups)
        self._names = [_names_of(group) for group in self.groups]
        self._options = [options_of(group) for group in self.groups]
        self._attributes = _attributes_of(optimizer)
        self._named_state = copy.deepcopy(named_state_of(optimizer))  # a step may change it in place
        self._changed_named_state: dict[Any, Any] | None = None  # after the first slice
        self._changed: dict[int, dict[str, Any]] = {}  # by group: its options after the first of its slices

    def step(self, part: Slice) -> None:
        """Steps the parameters of `part`. The groups are whole again afterwards, whatever happens."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        whole = [(group["params"], group.get("param_names")) for group in self.groups]
        optimizer.__dict__.update(self._attributes)
        if self._changed_named_state is not None:
            _put_named_state(optimizer, copy.deepcopy(self._named_state))
        try:
            for index, parameters in part.parameters.items():
                self._restore(index)
                group = self.groups[index]
                names = self._names[index]
                if names:
                    group["param_names"] = [names[id(parameter)] for parameter in parameters]
                group["params"] = parameters
            optimizer.param_groups = [self.groups[index] for index in part.parameters]
            self._own_step(*self._args, **self._kwargs)
        finally:
            optimizer.param_groups = groups
            for group, (parameters, named) in zip(self.groups, whole, strict=True):
                group["params"] = parameters
                if named is None:
                    group.pop("param_names", None)
                else:
                    group["param_names"] = named
        if self._changed_named_state is None:
            self._changed_named_state = named_state_of(optimizer)
        else:
            _put_named_state(optimizer, self._changed_named_state)
        for index in part.parameters:
            self._changed.setdefault(index, options_of(self.groups[index]))

    def _restore(self, index: int) -> None:
        group, options = self.groups[index], self._options[index]
        for added in set(group) - set(options) - {"params", "param_names"}:
            del group[added]
        group.update(options)

    def keep_values(self) -> None:
        """Copies tensors among the options and attributes, which the program may write to before the slices run: a
        learning rate, the scale of a GradScaler."""
        self._options = [{name: _kept(value) for name, value in options.items()} for options in self._options]
        self._attributes = {name: _kept(value) for name, value in self._attributes.items()}

    def names_of_attributes(self) -> list[str]:
        return list(self._attributes)

    def end(self) -> None:
        """Gives every group the options that its first slice left. Raises if a later slice left others."""
        for index, options in self._changed.items():
            found = options_of(self.groups[index])
            if any(
                found.get(name) is not value and not _equal(found.get(name), value) for name, value in options.items()
            ):
                raise VdnnError(
                    slicing_refusal(self._optimizer, f"it changed options of group {index} by what is in a slice")
                )


def _evaluated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments with a closure that returns the loss, which is evaluated here, as the own step would."""
    closure = kwargs.get("closure", args[0] if args else None)
    if not callable(closure):
        return args, kwargs, None
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}, loss
    return (lambda: loss, *args[1:]), kwargs, loss


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}


def named_state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state that belongs to no parameter: some optimizers keep some under a name."""
    states: dict[Any, Any] = optimizer.state
    return {key: state for key, state in states.items() if not isinstance(key, torch.Tensor)}


def _put_named_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    for added in named_state_of(optimizer).keys() - state.keys():
        del optimizer.state[added]
    optimizer.state.update(state)


def _names_of(group: Group) -> dict[int, str]:
    """The names of the parameters of a group, by id; empty if they have none."""
    names = group.get("param_names")
    return {} if names is None else dict(zip(map(id, group["params"]), names, strict=True))


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(_kept, value)) if type(value) in (list, tuple) else value


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left.cpu(), right.cpu()))
    return type(left) is type(right) and bool(left == right)


def slicing_refusal(optimizer: torch.optim.Optimizer, reason: str) -> str:
    """The message for an optimizer that cannot step on a part of its parameters at a time."""
    return (
        f"{type(optimizer).__name__} cannot be stepped in slices of its parameters: {reason}. "
        "Leave out optimizer= for it."
    )


def interruption_message(optimizer: torch.optim.Optimizer, stepped: int, total: int, error: BaseException) -> str:
    """The message for a step that ended between two slices."""
    return (
        f"the step of {type(optimizer).__name__} stopped after {stepped} of {total} parameters: "
        f"{str(error).rstrip('.')}. Model and optimizer are between two steps: load both from the last "
        "checkpoint before you go on."
    )
