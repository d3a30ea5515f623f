"""Rehearses a step without data and without a device: records what a model saves and computes on a given card.

A subject is a function of the batch size that makes a model and its inputs, or a module with a batch of its inputs. The
first step warms up. The second is recorded while everything that may move is offloaded, or runs under a plan if one is
given: its timeline then shows whether the plan's prediction holds.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.cuda_shaped import BACKEND, CudaShaped
from vdnn.runtime.session.offload import offload
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

# foreach=True, as torch chooses on a GPU. On CPU tensors, which rehearsals use, torch would launch once per parameter.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The results of a rehearsal. `timeline` is that of the step under the plan, or None without a plan."""

    recording: Recording
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    timeline: Timeline | None


class Staged(NamedTuple):
    """A model without data, a function that runs one step, and the inputs that exist before the first step."""

    model: torch.nn.Module
    step: Callable[[], object]
    inputs: object = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and inputs to rehearse. `make` is called under a FakeTensorMode, so that its tensors have no data."""

    make: Callable[[], Staged]


def subject_of(model: object, batch: object, loss: Callable[[Any], torch.Tensor] | None = None) -> Subject:
    """The subject for a function of a batch size, or for a module and its inputs (a tensor, or a tuple or dict).

    The function returns (model, inputs), (model, inputs, loss), or an object with `model` and `step()`. The loss is a
    function of the model's output. The default is the output's `loss`, or else the sum of its squares.
    """
    if isinstance(model, torch.nn.Module):
        return Subject(lambda: _stage_module(model, batch, loss or loss_of))
    if not callable(model):
        raise TypeError(f"plan: expected a module or a function of a batch size, got {type(model).__name__}.")
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch: expected a number, 1 or more, got {batch!r}.")
    return Subject(lambda: _stage_returned(model(batch), loss))


def _stage_module(module: torch.nn.Module, inputs: object, loss: Callable[[Any], torch.Tensor]) -> Staged:
    """Stages a copy without data. The user's module and tensors are not changed."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if not isinstance(mode, FakeTensorMode):
        raise RuntimeError("Subject.make: expected an active FakeTensorMode. Call it inside a VirtualMachine.")
    with unset_fake_temporarily(), FakeCopyMode(mode):
        model = copy.deepcopy(module)
    fake = tree_map_only(torch.Tensor, mode.from_tensor, inputs)
    return Staged(model, lambda: _backward(loss(_call_model(model, fake))), fake)


def _stage_returned(returned: Any, loss: Callable[[Any], torch.Tensor] | None) -> Staged:
    """Stages what the user's function returned."""
    if hasattr(returned, "step") and isinstance(getattr(returned, "model", None), torch.nn.Module):
        return Staged(returned.model, returned.step)
    if isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module):
        model, inputs = returned[:2]
        chosen = returned[2] if len(returned) == 3 else loss or loss_of
        return Staged(model, lambda: _backward(chosen(_call_model(model, inputs))), inputs)
    raise TypeError(
        "plan: the function must return (model, inputs), (model, inputs, loss), or an object with `model` and "
        f"`step()`, but it returned {type(returned).__name__}."
    )


def _backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


def _call_model(model: torch.nn.Module, inputs: object) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(output: Any) -> torch.Tensor:
    """The output's `loss` if it has one, or else the sum of the squares of its first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"plan: expected the model to return a tensor or an output with `loss`, got {type(output).__name__}. "
            "Pass loss=, a function of the output."
        )
    return output.float().square().sum()


def rehearse(
    subject: Subject,
    hardware: str | os.PathLike[str] | HardwareProfile,
    *,
    plan: Plan | None = None,
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
) -> Rehearsal:
    """Runs a warm-up step and a second step of `subject` on a virtual machine, the second under `plan` if one is given.

    With `optimizer`, its step is part of each, and its state exists before the second step.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(map(repr, OPTIMIZERS))}, got {optimizer!r}.")
    with _machine(hardware) as machine:
        staged = subject.make()
        model, step = staged.model, staged.step
        machine.tracker.track([model, staged.inputs])
        updates = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
        policy = "vdnn-all" if plan is None else "auto"
        with offload(policy, plan=plan, device=machine, measure=True, warmup_steps=1, min_bytes=min_bytes) as session:
            for _ in range(2):
                step()
                gradient_bytes = _bytes_of(weight.grad for weight in model.parameters() if weight.grad is not None)
                if updates is not None:
                    updates.step()
                session.step()
                model.zero_grad(set_to_none=True)
        recording, timeline = session.recording, session.timeline
        session.close()
        optimizer_bytes = 0 if updates is None else _state_bytes(updates)
    if recording is None:
        raise VdnnError(
            f"plan: there is nothing to plan: the step saves no tensor of {min_bytes} or more that may be offloaded. "
            "Pass a smaller min_bytes (--min-bytes) or a larger batch."
        )
    return Rehearsal(
        replace(recording, backend=BACKEND),
        _bytes_of(model.parameters()),
        gradient_bytes,
        optimizer_bytes,
        None if plan is None else timeline,
    )


@contextlib.contextmanager
def _machine(hardware: str | os.PathLike[str] | HardwareProfile) -> Iterator[VirtualMachine]:
    with VirtualMachine(hardware) as machine, CudaShaped():
        yield machine


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' storages. A storage that several tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = (one for state in optimizer.state.values() for one in state.values())
    return _bytes_of(one for one in held if isinstance(one, torch.Tensor))
