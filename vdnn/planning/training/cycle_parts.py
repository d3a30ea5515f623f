"""Cycles that are put together from the parts of their units, for a search that changes few units at a time.

The needs and moves of a unit depend on its own placement and on the layout of the cycle, which says which tasks there
are. Parts are known once they were asked for, so that most cycles are made ten times as fast as by cycle_of().
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

from vdnn.planning.training.cycle import Task, TaskKind, cycle_of, tasks_of
from vdnn.planning.training.native_cycle import (
    KINDS,
    NativeCycle,
    NativeMove,
    durations_of,
    native_cycle_of,
    native_moves_of,
)
from vdnn.planning.training.placement import Activations, Placement, State, UnitPlacement
from vdnn.planning.training.training import Training

_FROM_USE = 2  # the cycles of a layout before its parts are made
_MOST_LAYOUTS = 64
_TASK = itemgetter(1)


class _Part(NamedTuple):
    """The part of a unit: changes of the needed bytes from task to task, its moves, and its bytes on the host."""

    changes: list[tuple[int, int]]
    outs: list[NativeMove]
    ins: list[NativeMove]
    bring_back: list[int]
    host_bytes: int


@dataclass(slots=True)
class _Layout:
    tasks: list[Task]
    kinds: list[int]
    durations_ns: list[int]
    backwards: list[list[int]]  # of each unit
    uses: int = 0
    parts: dict[tuple[int, UnitPlacement], _Part] = field(default_factory=dict)


class CycleParts:
    """The cycles of one training."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._layouts: dict[object, _Layout] = {}

    def cycle_of(self, placement: Placement) -> NativeCycle:
        """As the cycle of cycle.py."""
        on_cpu = tuple(one.state is State.CPU for one in placement.units)
        key = (
            placement.step_time,
            placement.slice_bytes,
            placement.forward_waits_for_steps,
            placement.delayed_update,
            on_cpu,
        )
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout_of(placement)
        layout.uses += 1
        if layout.uses < _FROM_USE:
            return native_cycle_of(cycle_of(self._training, placement))
        return self._put_together(layout, placement)

    def _layout_of(self, placement: Placement) -> _Layout:
        kept = tuple(replace(one, activations=Activations.KEEP) for one in placement.units)
        tasks = tasks_of(self._training, replace(placement, units=kept))
        backwards: list[list[int]] = [[] for _ in self._training.units]
        for index, task in enumerate(tasks):
            if task.kind is TaskKind.BACKWARD:
                backwards[task.unit].append(index)
        return _Layout(tasks, [KINDS[task.kind] for task in tasks], durations_of(tasks), backwards)

    def _part_of(self, layout: _Layout, placement: Placement, unit: int) -> _Part:
        cycle = cycle_of(self._training, placement, unit, layout.tasks)
        changes, before = [], 0
        for task, nbytes in enumerate(cycle.needed_bytes):
            if nbytes != before:
                changes.append((task, nbytes - before))
                before = nbytes
        return _Part(changes, *native_moves_of(cycle), cycle.host_bytes)

    def _put_together(self, layout: _Layout, placement: Placement) -> NativeCycle:
        needed, durations_ns = [0] * len(layout.tasks), layout.durations_ns.copy()
        needed[0] = self._training.fixed_bytes
        outs: list[NativeMove] = []
        ins: list[NativeMove] = []
        bring_back: list[int] = []
        host_bytes, cpu_steps = 0, []
        for index, one in enumerate(placement.units):
            part = layout.parts.get((index, one))
            if part is None:
                part = layout.parts[index, one] = self._part_of(layout, placement, index)
            for task, change in part.changes:
                needed[task] += change
            earlier = len(outs)
            outs += part.outs
            ins += part.ins
            bring_back += [-1 if back < 0 else back + earlier for back in part.bring_back]
            host_bytes += part.host_bytes
            unit = self._training.units[index]
            if one.activations in (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST):
                for backward in layout.backwards[index]:
                    durations_ns[backward] += unit.forward_ns
            if one.state is State.CPU and unit.gradient_bytes:
                cpu_steps.append(index)
        if not self._training.clips:
            cpu_steps.reverse()  # as their gradients come
        leave, come = _by_task(outs), _by_task(ins)
        places = [-1] * (len(outs) + 1)  # the last one is that of -1
        for place, index in enumerate(leave):
            places[index] = place
        return NativeCycle(
            layout.kinds,
            durations_ns,
            list(itertools.accumulate(needed)),
            [outs[index] for index in leave],
            [ins[index] for index in come],
            [places[bring_back[index]] for index in come],
            cpu_steps,
            host_bytes,
        )


def _by_task(moves: list[NativeMove]) -> list[int]:
    return sorted(range(len(moves)), key=list(map(_TASK, moves)).__getitem__)
