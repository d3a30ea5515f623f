"""vdnn.plan_training: plans a whole training for a card before any run, with its optimizer and its host.

It rehearses one micro-batch without data, makes a training of its units, and searches where each of their bytes lives
and when it moves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import BudgetError, InvalidArgumentError, LibraryMissingError
from vdnn.hardware import HardwareProfile, HostFigures, load_profile
from vdnn.planning.budget import bytes_without_budget, parse_budget
from vdnn.planning.costs import profile_costs
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.least_placement import (
    fitting_host_bytes,
    fitting_placement,
    largest_layers,
    least_training_bytes,
)
from vdnn.planning.training.placement import Allowed, Placement, UnitPlacement, all_alike
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training, TrainingMachine
from vdnn.planning.training.training_bound import training_bound
from vdnn.report.training_report import TrainingReport
from vdnn.runtime.rehearsal.chosen_passes import AUTO, fastest_passes
from vdnn.runtime.rehearsal.host_probe import host_of
from vdnn.runtime.rehearsal.placed_units import busy_spans, placed_parameters, placed_units, task_memory
from vdnn.runtime.rehearsal.ranks import Ranks, on_one_rank, ranks_of
from vdnn.runtime.rehearsal.rehearsal import subject_of
from vdnn.runtime.rehearsal.rehearsed_training import RehearsedTraining, rehearse_training
from vdnn.runtime.rehearsal.subjects import Subject
from vdnn.runtime.rehearsal.ways_out import with_ways_out

FREEDOMS = {"cpu-step": "cpu_steps", "deferred": "deferred", "in-backward": "in_backward"}
# torch's fused AdamW, with gradients and parameters in float32, moved 23 GB/s on two cores.
_CORE_BYTES_PER_S = 11_500_000_000
# A profile without figures of its host: memory that takes twice what the link moves.
_TIMES_THE_LINK = 2.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The conditions of a plan, whatever the batch. `machine` has the host; `budget` is as users write it. `issues` are
    the figures of what the host issues, None if the plan is for a host that takes no time."""

    profile: HardwareProfile
    machine: TrainingMachine
    budget: int | str | None
    allowed: Allowed
    notes: tuple[str, ...] = ()
    ranks: Ranks | None = None
    issues: HostFigures | None = None

    def budget_bytes(self, training: Training) -> int:
        if self.budget is None:
            return bytes_without_budget(self.profile.memory_bytes)
        return parse_budget(self.budget).bytes_for(self.profile.memory_bytes, least_training_bytes(training))


def plan_training(
    model: torch.nn.Module | Callable[[int], Any],
    batch: Any,
    *,
    hardware: str | os.PathLike[str] | HardwareProfile = "h100",
    budget: int | str | None = None,
    host: int | str | None = None,
    host_cores: int | None = None,
    optimizer: str | None = None,
    master_weights: bool = False,
    micro_batches: int | str | None = None,
    clip: bool | None = None,
    allow: tuple[str, ...] = (),
    loss: Callable[[Any], torch.Tensor] | None = None,
    ranks: int | None = None,
    shard: str | None = None,
    host_speed: float | str = 1.0,
) -> TrainingReport:
    """Plans a whole training: activations, parameters, gradients and optimizer state, under a budget of the device and
    the memory of the host. Neither need be present.

    * `model`, `batch`, `hardware`, `budget`, `loss`: as for vdnn.plan. A batch is one micro-batch.
    * `host`: the host's memory that the training may take, such as "128GiB". Default: that of the profile's host.
    * `host_cores`: the cores for optimizer steps on the CPU. Default: those of the profile's host.
    * `optimizer`: "sgd", "momentum" or "adamw", for a model that comes without one.
    * `master_weights`: the optimizer keeps its state, and copies of the parameters, in float32.
    * `micro_batches`: passes before each step. Default: those of the model's own step. "auto": the fastest for `batch`.
    * `clip`: True if gradients are clipped by their norm. Default: whether the model's own step does that.
    * `allow`: ways of the step beyond moving bytes: "cpu-step" (its bits are the CPU's), "deferred", "in-backward".
    * `ranks`: the number of cards of the training. The plan is for one of them. Batch and host are those of each.
    * `shard`: "fsdp2" (default) cuts parameters, gradients and state, "ddp" nothing. The wrapped units are the blocks.
    * `host_speed`: how many times as fast as the profile's host yours is; "measured" takes the host of this machine.

        print(vdnn.plan_training(build, 1, hardware="rtx-4090", host="128GiB", optimizer="adamw"))
    """
    terms = terms_of(
        hardware,
        budget=budget,
        host=host,
        host_cores=host_cores,
        allow=allow,
        ranks=ranks,
        shard=shard,
        host_speed=host_speed,
    )
    ahead = TrainingAhead(
        lambda size: subject_of(model, size, loss),
        terms,
        type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "model"),
        optimizer=optimizer,
        master_weights=master_weights,
        micro_batches=micro_batches,
        clips=clip,
        has_sizes=isinstance(batch, int) and not isinstance(model, torch.nn.Module),
    )
    try:
        return ahead.report(batch)
    except BudgetError as refused:
        raise ahead.with_ways_out(refused, batch) from None


class TrainingAhead:
    """Plans a training for any batch. Each batch is rehearsed once.

    `micro_batches`: "auto" divides a batch into the fastest number of passes. `has_sizes`: a subject can be made for
    every size of the batch, and not only for one. The other options are those of plan_training.
    """

    def __init__(
        self,
        subject_for: Callable[[Any], Subject],
        terms: Terms,
        name: str,
        *,
        optimizer: str | None,
        master_weights: bool,
        micro_batches: int | str | None,
        clips: bool | None,
        has_sizes: bool = True,
        certify: bool = True,
        on_progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        if isinstance(micro_batches, str) and micro_batches != AUTO:
            raise ValueError(f"micro_batches: expected a number or {AUTO!r}, got {micro_batches!r}.")
        if micro_batches == AUTO and not has_sizes:
            raise ValueError(
                f"micro_batches: expected a function of the batch and the size of the whole batch beside {AUTO!r}, "
                "because passes of several sizes are planned, got inputs of one size."
            )
        self.terms = terms
        self._subject_for, self._name, self._has_sizes = subject_for, name, has_sizes
        self._optimizer, self._master_weights, self._clips = optimizer, master_weights, clips
        self._divides, self._passes = micro_batches == AUTO, None if isinstance(micro_batches, str) else micro_batches
        self._certify, self._on_progress = certify, on_progress
        self._known: dict[tuple[int, int | None, int], RehearsedTraining] = {}

    def rehearsed(self, batch: Any, passes: int | None = None, loss_chunks: int = 0) -> RehearsedTraining:
        """`passes`: the number of passes, in place of the requested one."""
        passes = self._passes if passes is None else passes
        key = batch if isinstance(batch, int) else 0, passes, loss_chunks
        if key not in self._known:
            made = rehearsed_training(
                self._subject_for(batch),
                self.terms,
                name=self._name,
                on_progress=self._progress_at(batch),
                optimizer=self._optimizer,
                master_weights=self._master_weights,
                micro_batches=passes,
                clips=self._clips,
                loss_chunks=loss_chunks,
            )
            self._known[key] = self._known[key[0], made.training.micro_batches, loss_chunks] = made
        return self._known[key]

    def report(self, batch: Any) -> TrainingReport:
        if self._divides:
            return fastest_passes(batch, partial(self._planned, certify=False), self._planned, self._on_progress)
        return self._planned(batch, None)

    def _planned(self, batch: Any, passes: int | None, *, certify: bool = True) -> TrainingReport:
        return planned_training(
            self.rehearsed(batch, passes),
            self.terms,
            batch=batch if isinstance(batch, int) else None,
            optimizer=shown_optimizer(self._optimizer, self._master_weights),
            certify=certify and self._certify,
            on_progress=self._progress_at(batch),
        )

    def _progress_at(self, batch: Any) -> Callable[[str], None]:
        at = f"batch {batch}: " if isinstance(batch, int) else ""
        return lambda doing: self._on_progress(at + doing)

    def with_ways_out(self, refused: BudgetError, batch: Any) -> BudgetError:
        """The error, with ways out where other batches can be rehearsed and were not."""
        if self._divides or not self._has_sizes:
            return refused

        def least_bytes(size: int, passes: int, loss_chunks: int) -> int:
            several = None if passes == 1 else passes * (self._passes or 1)
            return least_training_bytes(self.rehearsed(size, several, loss_chunks).training)

        return with_ways_out(refused, batch, least_bytes, self._on_progress)


def terms_of(
    hardware: str | os.PathLike[str] | HardwareProfile,
    *,
    budget: int | str | None = None,
    host: int | str | None = None,
    host_cores: int | None = None,
    allow: tuple[str, ...] = (),
    ranks: int | None = None,
    shard: str | None = None,
    host_speed: float | str | None = None,
) -> Terms:
    """Checks what a user gave. Raises ValueError before anything is rehearsed. Without `host_speed` the plan is for a
    host that takes no time."""
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    issues = None if host_speed is None else host_of(profile, host_speed)
    unknown = [one for one in allow if one not in FREEDOMS]
    if unknown:
        raise ValueError(f"allow: expected some of {', '.join(FREEDOMS)}, got {unknown[0]!r}.")
    if host_cores is not None and host_cores < 1:
        raise ValueError(f"host_cores: expected a number, 1 or more, got {host_cores}.")
    if budget is not None:
        parse_budget(budget)
    cards = ranks_of(profile, ranks, shard)
    notes = []
    rate = profile.host.get("memory_bytes_per_s")
    if rate is None:
        rate = int(_TIMES_THE_LINK * profile.duplex_bytes_per_s)
        notes.append(
            f"the profile {profile.name!r} has no figures of its host: its memory is assumed to take "
            f"{format_bytes(rate)} a second, twice what the link moves"
        )
    cpu = profile.host.get("step_bytes_per_s", rate)
    if host_cores is not None:
        cpu = min(rate, host_cores * _CORE_BYTES_PER_S)
    if host is None and "memory_bytes" not in profile.host:
        raise ValueError(
            f"host: expected the bytes of the host's memory, such as 128GiB, because the profile {profile.name!r} has "
            "no host, got None."
        )
    try:
        host_bytes = profile.host["memory_bytes"] if host is None else parse_bytes(host)
    except (TypeError, ValueError) as error:
        raise type(error)(f"host: {error}") from None
    machine = TrainingMachine(profile.name, profile_costs(profile, issues), host_bytes, rate, cpu)
    freedoms = Allowed(**{FREEDOMS[one]: True for one in allow})
    if cards is not None and not profile.cards:
        notes.append(
            f"the profile {profile.name!r} has no link between cards: collectives take half of what the link to the "
            "host moves in both directions, and are not slowed by copies on it"
        )
    return Terms(profile, machine, budget, freedoms, tuple(notes), cards, issues)


def planned_training(
    rehearsed: RehearsedTraining,
    terms: Terms,
    *,
    batch: int | None,
    optimizer: str,
    certify: bool = True,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> TrainingReport:
    """The best plan of a rehearsed training. Raises BudgetError if the card is too small, and InvalidArgumentError if
    the host is: both say what would do."""
    training, machine = rehearsed.training, terms.machine
    if terms.allowed.in_backward and training.clips:
        raise ValueError(
            "allow: expected no 'in-backward' with clip, got both: a norm of the gradients is known only after the "
            "whole backward."
        )
    budget_bytes = terms.budget_bytes(training)
    began = time.perf_counter()
    kept = all_alike(training, UnitPlacement())
    kept_peak_bytes = max(cycle_of(training, kept).needed_bytes)
    if kept_peak_bytes <= budget_bytes and not terms.allowed.cpu_steps:
        placement, bound_ns = kept, training.kept_ns if certify else None
    else:
        placement, bound_ns = _searched(rehearsed, terms, budget_bytes, certify=certify, on_progress=on_progress)
    step = simulate_training(training, machine, placement, budget_bytes, with_spans=True)
    stand_ins = [f"the step asked for a value that depends on data: {one}" for one in rehearsed.stand_ins]
    return TrainingReport(
        model=training.name,
        batch=batch,
        micro_batches=training.micro_batches,
        optimizer=optimizer,
        clips=training.clips,
        hardware=terms.profile.name,
        budget_bytes=budget_bytes,
        host_limit_bytes=machine.host_bytes,
        host_bytes_per_s=float(machine.host_bytes_per_s),
        cpu_bytes_per_s=float(machine.cpu_bytes_per_s),
        link_bytes_per_s=float(machine.link.to_device_bytes_per_s),
        allowed=tuple(name for name, field in FREEDOMS.items() if getattr(terms.allowed, field)),
        computing_ns=training.computing_ns - (0 if rehearsed.rank is None else rehearsed.rank.waited_ns),
        step_ns=step.step_ns,
        issue_ns=step.issue_ns,
        bound_ns=bound_ns,
        step_time=step.placement.step_time.value,
        slice_bytes=step.placement.slice_bytes,
        peak_bytes=step.peak_bytes,
        kept_peak_bytes=kept_peak_bytes,
        rehearsed_peak_bytes=rehearsed.rehearsed_peak_bytes,
        cycle_peak_bytes=rehearsed.cycle_peak_bytes,
        host_bytes=step.host_bytes,
        to_device_bytes=step.to_device_bytes,
        to_host_bytes=step.to_host_bytes,
        cpu_step_bytes=step.cpu_step_bytes,
        parameter_bytes=sum(unit.parameter_bytes for unit in training.units),
        gradient_bytes=sum(unit.gradient_bytes for unit in training.units),
        state_bytes=sum(unit.state_bytes for unit in training.units),
        fixed_bytes=training.fixed_bytes,
        units=placed_units(training, step.placement),
        memory=task_memory(step),
        spans=busy_spans(training, step),
        notes=(*terms.notes, *stand_ins),
        plan_seconds=round(time.perf_counter() - began, 3),
        rank=rehearsed.rank,
        parameters=placed_parameters(step.placement, rehearsed.parameters),
    )


def _searched(
    rehearsed: RehearsedTraining,
    terms: Terms,
    budget_bytes: int,
    *,
    certify: bool,
    on_progress: Callable[[str], None],
) -> tuple[Placement, int | None]:
    """The best placement found, and the certified least time."""
    training, machine = rehearsed.training, terms.machine
    on_progress("searching where everything lives")
    start = fitting_placement(training, budget_bytes, machine.host_bytes)
    _require_room(rehearsed, terms, budget_bytes, fits=start is not None)
    starts = (start,) if start is not None else ()
    step = auto_placement(
        training.without_host(),
        machine,
        budget_bytes,
        terms.allowed,
        starts,
        lambda share: on_progress(f"searching where everything lives, {share:.0%}"),
    )
    if simulate_training(training, machine, step.placement, budget_bytes).step_ns > step.step_ns:
        step = auto_placement(
            training,
            machine,
            budget_bytes,
            terms.allowed,
            (*starts, step.placement),
            lambda share: on_progress(f"searching with fewer copies and recomputes to issue, {share:.0%}"),
        )
    if not certify:
        return step.placement, None
    on_progress("certifying the plan")
    try:
        return step.placement, training_bound(training, machine, budget_bytes, terms.allowed)
    except LibraryMissingError:
        return step.placement, None


def searched_placement(rehearsed: RehearsedTraining, terms: Terms, budget_bytes: int) -> Placement:
    """The best placement found, without a certificate. Raises as planned_training."""
    return _searched(rehearsed, terms, budget_bytes, certify=False, on_progress=lambda doing: None)[0]


def rehearsed_training(
    subject: Subject, terms: Terms, *, name: str, on_progress: Callable[[str], None], **options: Any
) -> RehearsedTraining:
    """rehearse_training() with its phrase of progress, and for one rank if there are several."""
    on_progress("rehearsing one micro-batch")
    rehearsed = rehearse_training(subject, terms.profile, name=name, host=terms.issues, **options)
    return rehearsed if terms.ranks is None else on_one_rank(rehearsed, terms.ranks)


def _require_room(rehearsed: RehearsedTraining, terms: Terms, budget_bytes: int, *, fits: bool) -> None:
    training, machine = rehearsed.training, terms.machine
    least = least_training_bytes(training)
    if least > budget_bytes:
        raise BudgetError(
            budget_bytes=budget_bytes,
            least_bytes=least,
            where=f"a step of {training.name}",
            resident_bytes=training.fixed_bytes,
            way_out=f"Raise the budget to {format_bytes(least)} ({least} bytes), or take a smaller batch and more "
            "micro-batches",
        )
    needed = fitting_host_bytes(training, budget_bytes)
    if fits or needed <= machine.host_bytes:
        return
    way_out = "a smaller model, or a larger budget of the device"
    if len(rehearsed.blocks) > 1:
        layers = largest_layers(training, rehearsed.blocks, budget_bytes, machine.host_bytes)
        way_out = f"{layers} of the {len(rehearsed.blocks)} layers" if layers else way_out
    raise InvalidArgumentError(
        argument="host",
        expected=f"{format_bytes(needed)} ({needed} bytes) of memory for {training.name} under "
        f"{format_bytes(budget_bytes)} of the device",
        got=f"{format_bytes(machine.host_bytes)}, which would do for {way_out}",
    )


def shown_optimizer(optimizer: str | None, master_weights: bool) -> str:
    """How a report names the optimizer."""
    return f"{optimizer or 'its own optimizer'}{' with master weights' if master_weights else ''}"
