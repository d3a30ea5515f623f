"""Checks the arguments `model`, `optimizer` and `parameters` of vdnn.offload, before anything has moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vdnn.runtime.training_state.optimizer_state import OptimizerState, state_of
from vdnn.runtime.training_state.parameters.frozen_parameters import FrozenParameters


def frozen_of(model: object, parameters: object) -> FrozenParameters | None:
    """The frozen parameters that a session shall manage, or None.

    Raises ValueError or TypeError for wrong arguments, and VdnnError for a model that reads them where no hook is.
    """
    if parameters is None:
        return None
    if parameters != "frozen":
        raise ValueError(f"parameters: expected 'frozen' or None, got {parameters!r}.")
    if model is None:
        raise ValueError("parameters: which model has them? Give model= as well.")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    return FrozenParameters(model)


def states_of(model: object, optimizer: object, *, has_parameters: bool = False) -> list[OptimizerState]:
    """The states of the optimizers that a session shall manage.

    Raises ValueError or TypeError for wrong arguments, and VdnnError for an optimizer that cannot step in slices.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if model is not None and optimizer is None and not has_parameters:
        raise ValueError("model: it says whose parameters the optimizer has. Give optimizer= as well, or parameters=.")
    optimizers = _listed(optimizer)
    if isinstance(model, torch.nn.Module):
        for one in optimizers:
            _require_parameters_of(model, one)
    return [state_of(one) for one in optimizers]


def _listed(optimizer: object) -> list[torch.optim.Optimizer]:
    several = list(optimizer) if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    given = [_unwrapped(one) for one in several]
    listed = [one for one in given if isinstance(one, torch.optim.Optimizer)]
    if len(listed) < len(given):
        wrong = next(one for one in given if not isinstance(one, torch.optim.Optimizer))
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, or several, got {type(wrong).__name__}.")
    if len({id(one) for one in listed}) < len(listed):
        raise ValueError("optimizer: the same optimizer is there twice. Give each one once.")
    return listed


def _unwrapped(optimizer: object) -> object:
    """The optimizer inside of what Accelerate or Lightning wrapped around it. They call its step."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _require_parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"optimizer: parameter {number} of group {index}, of shape {list(parameter.shape)}, is not one of "
                    "the model's. Make the optimizer from this model's parameters, after its last .to() and wrapper, "
                    "or leave out model=."
                )
