"""Rehearses a step without data and without a device: records what a model saves and computes on a given card.

The step is recorded while everything that may move is offloaded, or runs under a plan if one is given: its timeline
then shows whether the plan's prediction holds. It begins as a later step of a training does. For that a step before it
warms up, unless that step would leave only what made_warm_up.py makes. subjects.py has what can be rehearsed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile, HostFigures
from vdnn.planning.host_costs import with_session
from vdnn.runtime.machine.caching_allocator import CachingAllocator
from vdnn.runtime.machine.repeated_step import StepEvents
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.machine.workspaces import Workspace
from vdnn.runtime.rehearsal.cuda_shaped import BACKEND
from vdnn.runtime.rehearsal.made_warm_up import MadeWarmUp
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.rehearsal.stand_ins import StandIn
from vdnn.runtime.rehearsal.subjects import Staged, Subject, held_by, loss_of, optimizers_of, subject_of
from vdnn.runtime.rehearsal.user_code import user_code
from vdnn.runtime.session.offload import offload
from vdnn.runtime.torch_internals.tensor_kinds import storages_of
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
    `reserved` is the memory that torch's allocator needs for the step under the plan, or None without a plan. `unused`
    are the names of the parameters that got no gradient, or None if a step had to warm up."""

    recording: Recording
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    timeline: Timeline | None
    stand_ins: tuple[StandIn, ...] = ()
    workspace: Workspace | None = None
    reserved: Reserved | None = None
    unused: frozenset[str] | None = field(default=None, compare=False)


def rehearse(
    subject: Subject,
    hardware: str | os.PathLike[str] | HardwareProfile,
    *,
    plan: Plan | None = None,
    host: HostFigures | None = None,
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
    after: Rehearsal | None = None,
) -> Rehearsal:
    """Runs a step of `subject` on a virtual machine that begins as one in the middle of a training. If a plan is given,
    the step runs under it, and a second step runs if its allocations may differ from those of the first. `after` is an
    earlier rehearsal of the subject, which shows whether a step has to warm up.

    With `optimizer`, its step is part of each, and its state exists before. With `host`, the recording has the time in
    which the host issues the step in a session; a program that asked for values waits for the device.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(map(repr, OPTIMIZERS))}, got {optimizer!r}.")
    asked = _Asked(subject, hardware, plan, host, optimizer, min_bytes)
    found = _rehearsed(asked, frozenset[str]() if after is None else after.unused)
    if isinstance(found, frozenset):
        found = _rehearsed(asked, found)
    return found if isinstance(found, Rehearsal) else cast(Rehearsal, _rehearsed(asked, None))


class _Asked(NamedTuple):
    """The arguments of rehearse()."""

    subject: Subject
    hardware: str | os.PathLike[str] | HardwareProfile
    plan: Plan | None
    host: HostFigures | None
    optimizer: str | None
    min_bytes: int | str


def _rehearsed(asked: _Asked, unused: frozenset[str] | None) -> Rehearsal | frozenset[str] | None:
    """Rehearses a step in which these parameters get no gradient. Returns their names if they are others, and None if a
    step has to warm up. With `unused` None a step warms up."""
    plan, host, min_bytes = asked.plan, asked.host, asked.min_bytes
    machine = VirtualMachine(asked.hardware, host=host, workspaces=True)
    allocators = () if plan is None else (CachingAllocator(), CachingAllocator(expandable=True))
    machine.tracker.allocators = allocators
    with machine, stage(machine) as values:
        staged = asked.subject.make()
        model = staged.model
        machine.tracker.track([model, *held_by(staged)])
        updates = _optimizer(staged, asked.optimizer)
        made = None
        # The places that an allocator gives to the optimizer's state depend on the step in which it is made.
        is_placed = updates is not None and bool(allocators)
        if unused is not None and not is_placed and MadeWarmUp.suits(staged):
            made = MadeWarmUp(staged, updates, machine.tracker, unused)
        policy, warmup_steps = "vdnn-all" if plan is None else "auto", 1 if made is None else 0
        with offload(
            policy, plan=plan, device=machine, measure=True, warmup_steps=warmup_steps, min_bytes=min_bytes
        ) as session:
            saves = session._engine.saves
            session._engine.has_warned = True  # where nothing is offloaded, that is said below

            def step(counted: MadeWarmUp | None = None) -> int:
                values.stand_ins.begin_step()
                with contextlib.nullcontext() if counted is None else counted.counted(saves.table.knows):
                    staged.step()
                gradient_bytes = _gradient_bytes(model)
                if updates is not None:
                    with user_code("calling the optimizer's step()"):
                        updates.step()
                session.step()
                model.zero_grad(set_to_none=True)
                return gradient_bytes

            if made is None:
                step()
            else:
                session._engine.begin_step(torch.device(machine.torch_type))
                model.zero_grad(set_to_none=True)
            for allocator in allocators:
                allocator.empty_cache()  # the plan is not followed yet: what was reserved is not needed
                allocator.reset_peak()
            events = StepEvents(machine.tracker.live_bytes_by_address())
            if allocators:
                machine.tracker.allocators = (*allocators, events)
            saves_before = session.counters.saves
            gradient_bytes = step(made)
            saved = session.counters.saves - saves_before
            recording, timeline = session.recording, session.timeline
            machine.tracker.allocators = allocators
            if recording is not None and made is not None and not (session.num_steps == 1 and made.was_a_later_step()):
                return made.unused if made.others_are_unused else None
            # A second step under the plan shows what stays reserved between two.
            if allocators and not events.repeat(allocators):
                step()
        session.close()
        optimizer_bytes = sum(_state_bytes(one) for one in {updates, *optimizers_of(staged)} if one is not None)
    if recording is None:
        raise VdnnError(
            f"plan: there is nothing to plan: the step saves no tensor of {min_bytes} or more that may be offloaded. "
            "Pass a smaller min_bytes (--min-bytes) or a larger batch."
        )
    if not any(life.uses for life in recording.lifetimes):
        raise VdnnError("plan: the step runs no backward pass through what it saves, so there is nothing to plan.")
    if made is not None:
        recording = replace(recording, parameter_bytes=made.parameter_bytes())
    if host is not None:
        recording = with_session(recording, host, saved, synchronizes=bool(values.stand_ins.given))
    return Rehearsal(
        replace(recording, backend=BACKEND),
        _bytes_of(model.parameters()),
        gradient_bytes,
        optimizer_bytes,
        None if plan is None else timeline,
        values.stand_ins.given,
        machine.largest_workspace,
        None if plan is None else Reserved(*(one.peak_reserved_bytes for one in allocators)),
        None if made is None else made.unused,
    )


def _optimizer(staged: Staged, name: str | None) -> torch.optim.Optimizer | None:
    """The optimizer that the rehearsal steps: that of the function, or the one of this name."""
    if name is not None and staged.optimizer is not None:
        raise ValueError(f"optimizer: expected none, because the function returns one, got {name!r}.")
    return staged.optimizer if name is None else OPTIMIZERS[name](staged.model.parameters())


def _gradient_bytes(model: torch.nn.Module) -> int:
    """The bytes of the gradients. A whole step may have set them to None again: then those that it must have had."""
    found = _bytes_of(weight.grad for weight in model.parameters() if weight.grad is not None)
    return found or _bytes_of(weight for weight in model.parameters() if weight.requires_grad)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' storages. A storage that several tensors share counts once."""
    storages = [storage for tensor in tensors for storage in storages_of(tensor)]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = (one for state in optimizer.state.values() for one in state.values())
    return _bytes_of(one for one in held if isinstance(one, torch.Tensor))
