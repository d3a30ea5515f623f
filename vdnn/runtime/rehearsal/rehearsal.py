"""Rehearses a step without data and without a device: records what a model saves and computes on a given card.

The first step warms up. The second is recorded while everything that may move is offloaded, or runs under a plan if one
is given: its timeline then shows whether the plan's prediction holds. subjects.py has what can be rehearsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile, HostFigures
from vdnn.planning.host_costs import with_session
from vdnn.runtime.machine.caching_allocator import CachingAllocator
from vdnn.runtime.machine.repeated_step import StepEvents
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.machine.workspaces import Workspace
from vdnn.runtime.rehearsal.cuda_shaped import BACKEND
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.rehearsal.stand_ins import StandIn
from vdnn.runtime.rehearsal.subjects import Staged, Subject, held_by, loss_of, optimizers_of, subject_of
from vdnn.runtime.rehearsal.user_code import user_code
from vdnn.runtime.session.offload import offload
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

__all__ = ["OPTIMIZERS", "Rehearsal", "Staged", "Subject", "loss_of", "rehearse", "subject_of"]

# foreach=True, as torch chooses on a GPU. On CPU tensors, which rehearsals use, torch would launch once per parameter.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
}


class Reserved(NamedTuple):
    """The bytes that torch reserves at most in a step, in segments of fixed sizes and in expandable ones."""

    in_segments: int
    in_expandable_segments: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The results of a rehearsal. `timeline` is that of the step under the plan, or None without a plan. `stand_ins`
    are the answers that the step got for values which depend on data. `workspace` is the largest of a library.
    `reserved` is the memory that torch's allocator needs for the step under the plan, or None without a plan."""

    recording: Recording
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    timeline: Timeline | None
    stand_ins: tuple[StandIn, ...] = ()
    workspace: Workspace | None = None
    reserved: Reserved | None = None


def rehearse(
    subject: Subject,
    hardware: str | os.PathLike[str] | HardwareProfile,
    *,
    plan: Plan | None = None,
    host: HostFigures | None = None,
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
) -> Rehearsal:
    """Runs a warm-up step and a second step of `subject` on a virtual machine. If a plan is given, the second step runs
    under it, and a third where its allocations may be others than those of the second.

    With `optimizer`, its step is part of each, and its state exists before the second step. With `host`, the recording
    has the time in which the host issues the step in a session; a program that asked for values waits for the device.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(map(repr, OPTIMIZERS))}, got {optimizer!r}.")
    machine = VirtualMachine(hardware, host=host, workspaces=True)
    allocators = () if plan is None else (CachingAllocator(), CachingAllocator(expandable=True))
    machine.tracker.allocators = allocators
    events: StepEvents | None = None
    with machine, stage(machine) as values:
        staged = subject.make()
        model, step = staged.model, staged.step
        machine.tracker.track([model, *held_by(staged)])
        updates = staged.optimizer
        if optimizer is not None:
            if updates is not None:
                raise ValueError(f"optimizer: expected none, because the function returns one, got {optimizer!r}.")
            updates = OPTIMIZERS[optimizer](model.parameters())
        policy = "vdnn-all" if plan is None else "auto"
        with offload(policy, plan=plan, device=machine, measure=True, warmup_steps=1, min_bytes=min_bytes) as session:
            for turn in range(3):
                for allocator in allocators if turn == 1 else ():
                    allocator.empty_cache()  # the first step has no plan: what it reserved is not needed
                    allocator.reset_peak()
                if turn == 1 and allocators:
                    events = StepEvents(machine.tracker.live_bytes_by_address())
                    machine.tracker.allocators = (*allocators, events)
                values.stand_ins.begin_step()
                saves_before = session.counters.saves
                step()
                gradient_bytes = _gradient_bytes(model)
                if updates is not None:
                    with user_code("calling the optimizer's step()"):
                        updates.step()
                session.step()
                model.zero_grad(set_to_none=True)
                if turn == 1:
                    recording, timeline = session.recording, session.timeline
                    machine.tracker.allocators = allocators
                    # A second step under the plan shows what stays reserved between two.
                    if events is None or events.repeat(allocators):
                        break
        saves = session.counters.saves - saves_before
        session.close()
        optimizer_bytes = sum(_state_bytes(one) for one in {updates, *optimizers_of(staged)} if one is not None)
    if recording is None:
        raise VdnnError(
            f"plan: there is nothing to plan: the step saves no tensor of {min_bytes} or more that may be offloaded. "
            "Pass a smaller min_bytes (--min-bytes) or a larger batch."
        )
    if host is not None:
        recording = with_session(recording, host, saves, synchronizes=bool(values.stand_ins.given))
    return Rehearsal(
        replace(recording, backend=BACKEND),
        _bytes_of(model.parameters()),
        gradient_bytes,
        optimizer_bytes,
        None if plan is None else timeline,
        values.stand_ins.given,
        machine.largest_workspace,
        None if plan is None else Reserved(*(one.peak_reserved_bytes for one in allocators)),
    )


def _gradient_bytes(model: torch.nn.Module) -> int:
    """The bytes of the gradients. A whole step may have set them to None again: then those that it must have had."""
    found = _bytes_of(weight.grad for weight in model.parameters() if weight.grad is not None)
    return found or _bytes_of(weight for weight in model.parameters() if weight.requires_grad)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' storages. A storage that several tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = (one for state in optimizer.state.values() for one in state.values())
    return _bytes_of(one for one in held if isinstance(one, torch.Tensor))
