"""The native form of a cycle, which the search simulates: it answers with the time of a step, and nothing else.

simulate_cycle.py and room.py are the same algorithms in Python, and say what runs when. Tests compare both.
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


def step_ns_of(
    training: Training, machine: TrainingMachine, placement: Placement, cycle: NativeCycle, budget_bytes: int
) -> int:
    """The time of a step whose moves have no release or issue yet. The cycle is not changed."""
    link = machine.link
    rates = (
        link.to_device_bytes_per_s / 1e9,
        link.to_host_bytes_per_s / 1e9,
        link.duplex_bytes_per_s / 1e9,
        machine.host_bytes_per_s / 1e9,
        machine.cpu_bytes_per_s / 1e9,
        float(link.latency_ns),
    )
    device_ns = round(
        _C.training_step_ns(
            kinds=cycle.kinds,
            durations_ns=cycle.durations_ns,
            needed_bytes=cycle.needed_bytes,
            outs=cycle.outs,
            ins=cycle.ins,
            bring_back=cycle.bring_back,
            cpu_steps=[(unit, training.units[unit].host_step_bytes) for unit in cycle.cpu_steps],
            units=len(training.units),
            overlap=placement.overlap,
            linger=placement.linger,
            linger_saves=placement.linger_saves,
            clips=training.clips,
            waits=placement.waits,
            stale=placement.stale,
            rates=rates,
            budget_bytes=placement.room_of(budget_bytes),
        )
    )
    return max(device_ns, issued_ns(training, machine, placement, len(cycle.outs) + len(cycle.ins)))
