"""Simulates the steps of a training under a placement: their time, and what the device and each copy engine do.

The native core simulates (csrc/planning/training_cycle.h). Its times are those of a host that is far enough ahead;
where the host needs longer to issue a step, steps follow each other as fast as it issues them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.planning.training.cycle import ByteClass, Cycle, cycle_of
from vdnn.planning.training.issued import issued_ns
from vdnn.planning.training.native_cycle import core_cycle, native_cycle_of, rates_of, step_ns_of
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.training import Training, TrainingMachine

_ROWS = ("to device", "to host", "cpu", "device")  # by number of the native core's engine


@dataclass(frozen=True, slots=True)
class Span:
    """One task, copy or step on the CPU of the last cycle. Times are from the start of that cycle."""

    row: str  # "device", "to host", "to device" or "cpu"
    name: str
    begin_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A simulated step. `held[t]` are the bytes on the device during task `t`, `needed[t]` those of them that it needs,
    by class; the others are on their way."""

    placement: Placement
    step_ns: int
    computing_ns: int
    peak_bytes: int
    host_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    cpu_step_bytes: int
    held: tuple[int, ...]
    needed: tuple[dict[ByteClass, int], ...]
    task_names: tuple[str, ...]
    spans: tuple[Span, ...] = ()
    issue_ns: int = 0  # in which the host issues the step

    @property
    def slowdown(self) -> float:
        return self.step_ns / self.computing_ns if self.computing_ns else 1.0


def simulate_training(
    training: Training, machine: TrainingMachine, placement: Placement, budget_bytes: int, *, with_spans: bool = False
) -> TrainingStep:
    """Simulates steps under a placement. Where it needs more than the budget, moves take no further room, and
    `peak_bytes` says how much it needs."""
    cycle = cycle_of(training, placement)
    native_cycle = native_cycle_of(cycle)
    step_ns = step_ns_of(training, machine, placement, native_cycle, budget_bytes)
    held = _give_room(cycle, training, machine, placement, budget_bytes)
    spans: tuple[Span, ...] = ()
    if with_spans:
        core = core_cycle(training, placement, native_cycle)
        found = core.spans(rates_of(machine), placement.room_of(budget_bytes))
        spans = tuple(_span(training, cycle, *one) for one in found)
    return TrainingStep(
        placement=placement,
        step_ns=step_ns,
        computing_ns=training.computing_ns,
        peak_bytes=max(held),
        host_bytes=cycle.host_bytes,
        to_device_bytes=sum(move.nbytes for move in cycle.ins),
        to_host_bytes=sum(move.nbytes for move in cycle.outs),
        cpu_step_bytes=sum(training.units[unit].host_step_bytes for unit in cycle.cpu_steps),
        held=tuple(held),
        needed=tuple(cycle.needed),
        task_names=tuple(f"{task.kind.value} of {training.units[task.unit].name}" for task in cycle.tasks),
        spans=spans,
        issue_ns=issued_ns(training, machine, placement, len(cycle.outs) + len(cycle.ins)),
    )


def cycle_with_room(training: Training, machine: TrainingMachine, placement: Placement, budget_bytes: int) -> Cycle:
    """The cycle of a placement, with the releases and issues of its moves under the budget."""
    cycle = cycle_of(training, placement)
    _give_room(cycle, training, machine, placement, budget_bytes)
    return cycle


def _give_room(
    cycle: Cycle, training: Training, machine: TrainingMachine, placement: Placement, budget_bytes: int
) -> list[int]:
    """Sets the releases and issues of all moves, and returns the bytes on the device at each task. Copies to the device
    are sorted by their issue."""
    core = core_cycle(training, placement, native_cycle_of(cycle))
    held, releases, issues = core.room(rates_of(machine), placement.room_of(budget_bytes))
    for move, release in zip(cycle.outs, releases, strict=True):
        move.bound = release
    for move, issue in zip(cycle.ins, issues, strict=True):
        move.bound = issue
    cycle.ins.sort(key=lambda move: (move.bound, move.task))
    return held


def _span(training: Training, cycle: Cycle, engine: int, index: int, begin_ns: float, end_ns: float) -> Span:
    row = _ROWS[engine]
    if row == "device":
        task = cycle.tasks[index]
        what, unit = task.kind.value, task.unit
    elif row == "cpu":
        what, unit = "step", cycle.cpu_steps[index]
    else:
        move = cycle.ins[index] if row == "to device" else cycle.outs[index]
        what, unit = move.byte_class.value, move.unit
    return Span(row, f"{what} of {training.units[unit].name}", begin_ns, end_ns)
