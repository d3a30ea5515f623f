"""Checks the arguments `model`, `optimizer` and `parameters` of vdnn.offload, before anything has moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vdnn.errors import CombinationError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.torch_internals.local_shards import has_fsdp_cpu_offload
from vdnn.runtime.training_state.optimizer_state import OptimizerState, state_of
from vdnn.runtime.training_state.parameters.managed_parameters import ManagedParameters
from vdnn.runtime.training_state.refusals import FSDP_OFFLOADS, refuse_what_cannot_step_on_the_cpu


def parameters_of(model: object, parameters: object, optimizer: object) -> ManagedParameters | None:
    """The parameters that a session shall manage, or None.

    Raises ValueError or TypeError for wrong arguments, and VdnnError for a model that reads them where no hook is.
    """
    if parameters is None:
        return None
    if parameters not in ("frozen", "all"):
        raise ValueError(f"parameters: expected 'frozen', 'all' or None, got {parameters!r}.")
    if parameters == "all" and optimizer is None:
        raise ValueError("parameters: which optimizer trains all of them? Give optimizer= as well, or use 'frozen'.")
    if model is None:
        raise ValueError("parameters: which model has them? Give model= as well.")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    return ManagedParameters(model, are_trained=parameters == "all")


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
        if has_fsdp_cpu_offload(model):
            raise CombinationError(**FSDP_OFFLOADS)
        for one in optimizers:
            _require_parameters_of(model, one)
    return [state_of(one) for one in optimizers]


def steps_on_cpu(optimizer_on: object, device: object, states: Sequence[OptimizerState]) -> bool:
    """Reads `optimizer_on`. Raises ValueError if it is wrong, and VdnnError for an optimizer that has to stay."""
    if optimizer_on not in ("device", "cpu"):
        raise ValueError(f"optimizer_on: expected 'device' or 'cpu', got {optimizer_on!r}.")
    if optimizer_on == "device":
        return False
    if not states:
        raise ValueError("optimizer_on: it says where the optimizer steps. Give optimizer= as well.")
    if isinstance(device, VirtualMachine):
        raise ValueError("optimizer_on: a VirtualMachine has no clock for the CPU. Use device='sim' to try it.")
    for state in states:
        refuse_what_cannot_step_on_the_cpu(state.optimizer)
    return True


def require_gradients_can_leave(gradients: object, states: Sequence[OptimizerState], *, on_cpu: bool) -> None:
    """Raises ValueError or TypeError if `gradients` of vdnn.offload asks for what cannot be."""
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"gradients: expected True, False or None, got {gradients!r}.")
    if gradients and not states:
        raise ValueError("gradients: whose parameters have them? Give optimizer= as well.")
    if gradients and on_cpu:
        raise ValueError("gradients: a step on the CPU takes them to the host by itself. Leave out one of the two.")


def defers_steps(optimizer_step: object, states: Sequence[OptimizerState], *, on_cpu: bool, parameters: object) -> bool:
    """Reads `optimizer_step`. Raises ValueError if it is wrong, or contradicts other arguments."""
    if optimizer_step not in ("immediate", "deferred"):
        raise ValueError(f"optimizer_step: expected 'immediate' or 'deferred', got {optimizer_step!r}.")
    if optimizer_step == "immediate":
        return False
    if not states:
        raise ValueError("optimizer_step: whose steps are deferred? Give optimizer= as well.")
    others = {"optimizer_on='cpu'": on_cpu, "parameters='all'": parameters == "all"}
    for name, is_given in others.items():
        if is_given:
            raise ValueError(
                f"optimizer_step: a deferred step needs parameters on the device, and {name} takes them to the host. "
                "Leave out one of the two."
            )
    return True


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
