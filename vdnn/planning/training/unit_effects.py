"""The effects of each placement of each unit at each place of the cycle: what it needs, computes and moves.

A place is the beginning of a unit's forward, backward or step. All placements have the same places in the same order,
so that their effects can be added: the effects of all units are those of keeping everything on the device, and what
each unit changes. They are read from the cycles of whole placements, so that the bound and the simulation share one
model. Times are in seconds, bytes in 1e9.

[Note: Places that a placement lacks] A unit that steps on the CPU has no step on the device. Its place then stands for
the beginning of the next task, and needs nothing. Without the steps of the other units, bytes that a unit reloads
behind them need not have left. Such moves do not count where steps may run on the CPU: the bound is lower then, never
wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vdnn.errors import LibraryMissingError
from vdnn.planning.training.cycle import ByteClass, Cycle, Move, TaskKind, cycle_of
from vdnn.planning.training.placement import (
    LEAST_SLICE,
    Activations,
    Allowed,
    Placement,
    StepTime,
    UnitPlacement,
    unit_choices,
    with_unit,
)
from vdnn.planning.training.training import Training

GB = 1e9
Place = tuple[TaskKind, int, int]  # kind, unit, micro-batch


@dataclass(slots=True)
class Effects:
    """Arrays with a number for each place. `ins` are due there, and `ahead` are those that may have been copied there
    although they are due later, of which `written_in_place` take no room. `outs` leave what runs from there to the next
    place. `cpu` are the bytes of steps on the CPU that may begin there, and `cpu_waits` those that could have begun
    before and have not to be done yet. `host` is one number."""

    needed: Any
    computing: Any
    ins: Any
    ahead: Any
    written_in_place: Any
    outs: Any
    cpu: Any
    cpu_waits: Any
    host: Any

    def __sub__(self, other: Effects) -> Effects:
        return Effects(*(getattr(self, name) - getattr(other, name) for name in Effects.__slots__))


class UnitEffects:
    """`base` are the effects of keeping everything on the device. `changes` has a row for each column in its arrays:
    the change that a placement of one unit makes. The chosen shares of the columns of a group add up to 1 at most.
    `columns[unit]` are those of its placements that are not to keep everything: of parameters, gradients and state with
    activations kept, and of activations alone. Needs NumPy, which SciPy brings."""

    def __init__(self, training: Training, allowed: Allowed, step_time: StepTime) -> None:
        self.training = training
        self._steps_may_lack = allowed.cpu_steps
        units = (UnitPlacement(),) * len(training.units)
        self._base = Placement(units, step_time, slice_bytes=LEAST_SLICE)
        cycle = cycle_of(training, self._base)
        self.places: list[Place] = list(dict.fromkeys((one.kind, one.unit, one.micro_batch) for one in cycle.tasks))
        self._number = {place: number for number, place in enumerate(self.places)}
        self._last_backward = max(n for n, place in enumerate(self.places) if place[0] is TaskKind.BACKWARD)
        tasks = Counter((one.kind, one.unit, one.micro_batch) for one in cycle.tasks)
        self.is_one_task = [tasks[place] == 1 for place in self.places]
        self.base = self._effects(cycle)
        self.columns: list[dict[UnitPlacement, int]] = [{} for _ in training.units]
        self.groups: list[range] = []
        found: list[Effects] = []
        for unit, columns in enumerate(self.columns):
            without = self._effects(cycle_of(training, self._base, unit))
            choices = unit_choices(training, unit, allowed)
            moved = [one for one in choices if one.activations is Activations.KEEP and one != UnitPlacement()]
            fates = [one for one in map(UnitPlacement, Activations) if one in choices and one != UnitPlacement()]
            for group in (moved, fates):
                columns.update(zip(group, range(len(found), len(found) + len(group)), strict=True))
                self.groups.append(range(len(found), len(found) + len(group)))
                for one in group:
                    changed = replace(self._base, units=with_unit(units, unit, one))
                    found.append(self._change(cycle_of(training, changed, unit), without))
        self.changes = _stacked(found, len(self.places))
        self.count = len(found)

    def _change(self, cycle: Cycle, without: Effects) -> Effects:
        """The change of one unit. See [Note: Places that a placement lacks]."""
        change = self._effects(cycle) - without
        there = {self._number[one.kind, one.unit, one.micro_batch] for one in cycle.tasks}
        for place in set(range(len(self.places))).difference(there):
            change.needed[place] = -self.base.needed[place]
        return change

    def _effects(self, cycle: Cycle) -> Effects:
        numpy, count = _numpy(), len(cycle.tasks)
        at = [self._number[one.kind, one.unit, one.micro_batch] for one in cycle.tasks]
        firsts = dict(zip(reversed(at), reversed(range(count)), strict=True))  # the first task of each place
        starts = self._starts(firsts, count)
        arrays = {name: numpy.zeros(len(self.places)) for name in Effects.__slots__}
        one = Effects(**arrays | {"host": cycle.host_bytes / GB})
        for place, first in firsts.items():
            one.needed[place] = cycle.needed_bytes[first] / GB
        for place, task in zip(at, cycle.tasks, strict=True):
            one.computing[place] += task.duration_ns / 1e9
        kept = [move for move in cycle.ins if not self._may_stay(move, cycle)]
        stays = {id(move.brings_back) for move in cycle.ins} - {id(move.brings_back) for move in kept}
        one.host -= sum(
            move.nbytes / GB
            for move in cycle.ins
            if move.byte_class is ByteClass.GRADIENT and id(move.brings_back) in stays
        )
        for move in kept:
            place = at[move.task % count]
            # Bytes that later slices of a step need are due at the next place.
            due = place if firsts[place] == move.task % count else (place + 1) % len(self.places)
            one.ins[due] += move.nbytes / GB
            self._add_ahead(one, move, starts, firsts, count)
        for move in cycle.outs:
            if id(move) not in stays:
                one.outs[at[move.task % count]] += move.nbytes / GB
        self._add_cpu_steps(one, cycle)
        return one

    def _may_stay(self, move: Move, cycle: Cycle) -> bool:
        """True if only steps of optimizers are between the last use and the next one. See [Note: Places that a
        placement lacks]."""
        between = range(move.earliest, move.task)
        may_stay = self._steps_may_lack and move.takes_room and not move.follows_step and len(between) > 0
        return may_stay and all(cycle.tasks[task % len(cycle.tasks)].kind is TaskKind.STEP for task in between)

    def _starts(self, firsts: dict[int, int], count: int) -> list[int]:
        """The task that each place stands for: see [Note: Places that a placement lacks]."""
        starts, following = [0] * len(self.places), count
        for place in reversed(range(len(self.places))):
            following = starts[place] = firsts.get(place, following)
        return starts

    def _add_ahead(self, one: Effects, move: Move, starts: list[int], firsts: dict[int, int], count: int) -> None:
        """A copy may be done at all places from its earliest task on, and counts as ahead until it is due."""
        for turn in (-count, 0):
            first = bisect_left(starts, move.earliest - turn)
            behind = bisect_left(starts, move.task - turn)
            while behind < len(starts) and starts[behind] == move.task - turn and behind not in firsts:
                behind += 1
            if behind > first:
                one.ahead[first:behind] += move.nbytes / GB
                one.written_in_place[first:behind] += 0.0 if move.takes_room else move.nbytes / GB

    def _add_cpu_steps(self, one: Effects, cycle: Cycle) -> None:
        """A step on the CPU begins behind the whole backward if gradients are clipped, else behind its unit's, and is
        done before its unit's forward."""
        last = self.training.micro_batches - 1
        for unit in cycle.cpu_steps:
            own = self._number[TaskKind.BACKWARD, unit, last]
            begins = ((self._last_backward if self.training.clips else own) + 1) % len(self.places)
            nbytes = self.training.units[unit].host_step_bytes / GB
            one.cpu[begins] += nbytes
            ends = self._number[TaskKind.FORWARD, unit, 0]
            for later in range(1, (ends - begins) % len(self.places)):
                one.cpu_waits[(begins + later) % len(self.places)] += nbytes


def _stacked(effects: Sequence[Effects], places: int) -> Effects:
    """One with arrays of a row for each."""
    numpy = _numpy()
    stacks = [numpy.array([getattr(one, name) for one in effects], dtype=float) for name in Effects.__slots__]
    if not effects:
        stacks = [numpy.zeros((0, places))] * (len(stacks) - 1) + [numpy.zeros(0)]
    return Effects(*stacks)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise LibraryMissingError(what="the bound of a plan", library="scipy", extra="plan") from None
    return numpy
