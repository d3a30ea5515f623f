"""The cycle of a training as the native core simulates it (csrc/planning/training_cycle.h), and the time of its step.

The search needs no more than the time. simulate_cycle.py adds what the device holds and when each resource runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vdnn import _C
from vdnn.planning.training.cycle import ByteClass, Cycle, Move, Task, TaskKind
from vdnn.planning.training.issued import issued_ns
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.training import Training, TrainingMachine

KINDS = {TaskKind.FORWARD: 0, TaskKind.BACKWARD: 1, TaskKind.STEP: 2}
_PARAMETER = ByteClass.PARAMETER


class NativeMove(NamedTuple):
    """As TrainingMove in csrc/planning/training_cycle.h, without the copy that it brings back."""

    nbytes: int
    task: int
    bound: int
    unit: int
    takes_room: bool
    follows_step: bool
    feeds_step: bool
    writes_parameters: bool


@dataclass(frozen=True, slots=True)
class NativeCycle:
    """`needed_bytes` are those of each task, without what moves take. Both kinds of moves are in the order of their
    tasks. `bring_back` has, for each copy to the device, the place of the copy to the host of the same bytes, or -1."""

    kinds: Sequence[int]
    durations_ns: Sequence[int]
    needed_bytes: list[int]
    outs: list[NativeMove]
    ins: list[NativeMove]
    bring_back: list[int]
    cpu_steps: list[int]
    host_bytes: int

    @property
    def moved_bytes(self) -> int:
        return sum(move[0] for move in self.outs) + sum(move[0] for move in self.ins)

    @property
    def size(self) -> int:
        return len(self.kinds) + len(self.outs) + len(self.ins)


def native_cycle_of(cycle: Cycle) -> NativeCycle:
    """The same cycle, whose moves have no release or issue yet."""
    return NativeCycle(
        [KINDS[task.kind] for task in cycle.tasks],
        durations_of(cycle.tasks),
        cycle.needed_bytes,
        *native_moves_of(cycle),
        cycle.cpu_steps,
        cycle.host_bytes,
    )


def durations_of(tasks: Sequence[Task]) -> list[int]:
    return [task.duration_ns for task in tasks]


def native_moves_of(cycle: Cycle) -> tuple[list[NativeMove], list[NativeMove], list[int]]:
    """The moves to the host and to the device, and what those to the device bring back."""
    places = {id(move): index for index, move in enumerate(cycle.outs)}

    def native(one: Move) -> NativeMove:
        writes = one.is_out and one.byte_class is _PARAMETER
        bound = one.bound if one.is_out else one.earliest
        return NativeMove(
            one.nbytes, one.task, bound, one.unit, one.takes_room, one.follows_step, one.feeds_step, writes
        )

    bring_back = [-1 if one.brings_back is None else places[id(one.brings_back)] for one in cycle.ins]
    return list(map(native, cycle.outs)), list(map(native, cycle.ins)), bring_back


def core_cycle(training: Training, placement: Placement, cycle: NativeCycle) -> _C.TrainingCycle:
    """The cycle in the native core, which simulates it."""
    return _C.TrainingCycle(
        kinds=cycle.kinds,
        durations_ns=cycle.durations_ns,
        needed_bytes=cycle.needed_bytes,
        outs=cycle.outs,
        ins=cycle.ins,
        bring_back=cycle.bring_back,
        cpu_steps=[(unit, training.units[unit].host_step_bytes) for unit in cycle.cpu_steps],
        units=len(training.units),
        overlap=placement.overlap,
        room_share_of_steps=placement.room_share_of_steps,
        room_share_of_passes=placement.room_share_of_passes,
        clips=training.clips,
        forward_waits_for_steps=placement.forward_waits_for_steps,
        delayed_update=placement.delayed_update,
    )


def rates_of(machine: TrainingMachine) -> tuple[float, float, float, float, float, float]:
    """Bytes per nanosecond of both directions of the link, of both together, of the host's memory and of steps on the
    CPU; and the latency of a copy."""
    link = machine.link
    return (
        link.to_device_bytes_per_s / 1e9,
        link.to_host_bytes_per_s / 1e9,
        link.duplex_bytes_per_s / 1e9,
        machine.host_bytes_per_s / 1e9,
        machine.cpu_bytes_per_s / 1e9,
        float(link.latency_ns),
    )


def step_ns_of(
    training: Training, machine: TrainingMachine, placement: Placement, cycle: NativeCycle, budget_bytes: int
) -> int:
    """The time of a step whose moves have no release or issue yet. The cycle is not changed."""
    native = core_cycle(training, placement, cycle)
    device_ns = round(native.step_ns(rates_of(machine), placement.room_of(budget_bytes)))
    return max(device_ns, issued_ns(training, machine, placement, len(cycle.outs) + len(cycle.ins)))
