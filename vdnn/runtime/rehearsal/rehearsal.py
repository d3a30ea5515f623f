"""One step without data and without a device: what a model will save and compute on a card that is not at hand.

What is rehearsed is a function of the batch size that makes a model and its inputs, or a module with a batch of its
inputs. The first step warms up, the second is recorded while everything that may leaves, and a third runs under a plan
if one is given: what happens then is what the plan predicted, or the difference shows.
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

# With lists of tensors, as torch chooses on a GPU; on the CPU, where rehearsals are, it would launch for each one.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """`timeline` is that of the step under the plan, if there was one."""

    recording: Recording
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    timeline: Timeline | None


class Staged(NamedTuple):
    """A model without data, a function that does one step, and what else is there before the first."""

    model: torch.nn.Module
    step: Callable[[], object]
    inputs: object = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is rehearsed: `make` is called where there is no data."""

    make: Callable[[], Staged]


def subject_of(model: object, batch: object, loss: Callable[[Any], torch.Tensor] | None = None) -> Subject:
    """Of a function of a batch size, or of a module and its inputs: a tensor, a tuple of arguments, or a dict of them.

    The function returns (model, inputs), (model, inputs, loss), or something with `model` and `step()`. The loss is a
    function of the model's output; without one it is the output's `loss`, or else the sum of its squares.
    """
    if isinstance(model, torch.nn.Module):
        return Subject(lambda: _copied(model, batch, loss or loss_of))
    if not callable(model):
        raise TypeError(f"plan: expected a module or a function of a batch size, got {type(model).__name__}.")
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch: expected a number, 1 or more, got {batch!r}.")
    return Subject(lambda: _made(model(batch), loss))


def _copied(module: torch.nn.Module, inputs: object, loss: Callable[[Any], torch.Tensor]) -> Staged:
    """The user's module and tensors stay as they are."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, FakeTensorMode), "called where there is no data"
    with unset_fake_temporarily(), FakeCopyMode(mode):
        model = copy.deepcopy(module)
    fake = tree_map_only(torch.Tensor, mode.from_tensor, inputs)
    return Staged(model, lambda: _backward(loss(_called(model, fake))), fake)


def _made(made: Any, loss: Callable[[Any], torch.Tensor] | None) -> Staged:
    if hasattr(made, "step") and isinstance(getattr(made, "model", None), torch.nn.Module):
        return Staged(made.model, made.step)
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        model, inputs = made[:2]
        chosen = made[2] if len(made) == 3 else loss or loss_of
        return Staged(model, lambda: _backward(chosen(_called(model, inputs))), inputs)
    raise VdnnError(
        "plan: the function is to return (model, inputs), (model, inputs, loss), or something with `model` and "
        f"`step()`; it returned {type(made).__name__}."
    )


def _backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


def _called(model: torch.nn.Module, inputs: object) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(output: Any) -> torch.Tensor:
    """Of an output that brings its loss, that; of any other the sum of its squares."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise VdnnError(f"plan: give a loss: the model returns {type(output).__name__}, which has none.")
    return output.float().square().sum()


def rehearse(
    subject: Subject,
    hardware: str | os.PathLike[str] | HardwareProfile,
    *,
    plan: Plan | None = None,
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
) -> Rehearsal:
    """With an optimizer its step is part of the step, and its state is there when the recorded one begins."""
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
                gradient_bytes = _bytes_of(one.grad for one in model.parameters() if one.grad is not None)
                if updates is not None:
                    updates.step()
                session.step()
                model.zero_grad(set_to_none=True)
        recording, timeline = session.recording, session.timeline
        session.close()
        optimizer_bytes = 0 if updates is None else _state_bytes(updates)
    if recording is None:
        raise VdnnError(
            f"plan: the step saves nothing of {min_bytes} or more that could leave the device: nothing to plan. "
            "Smaller saves count with a smaller min_bytes, or --min-bytes; a larger batch makes them larger."
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
    """Storages that are shared count once."""
    return sum({id(one.untyped_storage()): one.untyped_storage().nbytes() for one in tensors}.values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = (one for state in optimizer.state.values() for one in state.values())
    return _bytes_of(one for one in held if isinstance(one, torch.Tensor))
