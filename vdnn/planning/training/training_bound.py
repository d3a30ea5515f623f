"""A certified lower bound on the step of a whole training: no placement under the budget has a shorter one.

[Note: The relaxation] For each unit, a linear program takes parts of the placements of its parameters, gradient and
state, and parts of the fates of its activations. What a part needs at each task, and what it moves, is read from the
cycles of whole placements, so that the bound and the simulation share one model. The memory that is needed at a task is
under the budget. The cycle is cut into windows. A window takes at least as long as its tasks. Copies to the device for
tasks of a window are done within it, except for as many bytes as had room at the task before it; copies to the host of
what its tasks leave are done within it, except for as many as have room at the task after it. The whole cycle has no
such exceptions. The link, the host's memory and the cores have their rates.

[Note: Left out] Latencies, whole units instead of parts, and that a copy waits for one of the other direction. This
makes the bound lower, never wrong. Each time of the optimizer's step has a program of its own; the least one counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vdnn.errors import LibraryMissingError, VdnnError
from vdnn.planning.bound.linear_program import LinearProgram
from vdnn.planning.training.cycle import Cycle, TaskKind, cycle_of
from vdnn.planning.training.estimate import Estimate, Row
from vdnn.planning.training.placement import (
    EXACT,
    LEAST_SLICE,
    Activations,
    Allowed,
    Placement,
    StepTime,
    UnitPlacement,
    unit_choices,
    with_unit,
)
from vdnn.planning.training.training import Training, TrainingMachine

_WINDOWS = 12
_TOLERANCE = 1e-6  # the solver's error
_Key = tuple[TaskKind, int, int]  # kind, unit, micro-batch
_GB = 1e9


@dataclass(frozen=True, slots=True)
class _Effects:
    """The cycle of one placement, by tasks that all placements have: bytes needed at each, and those moved in each
    window. Times are in seconds, bytes in 1e9."""

    needed: dict[_Key, Any]
    computing: list[Any]
    to_device: list[Any]
    to_host: list[Any]
    host: Any
    cpu: Any
    cpu_before: list[Any]  # of steps on the CPU for tasks of each window, if gradients are clipped


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The solution of the program for one time of the step: for each unit, the parts of placements other than to keep
    everything on the device. `least_s` is infinite if no placement fits."""

    step_time: StepTime
    least_s: float
    parts: tuple[tuple[tuple[UnitPlacement, float], ...], ...]
    estimate: Estimate


@functools.lru_cache(maxsize=4)  # a search and the bound of its plan ask for the same
def relaxations(
    training: Training, machine: TrainingMachine, budget_bytes: int, allowed: Allowed = EXACT
) -> tuple[Relaxation, ...]:
    """One for each time of the step, the shortest first. Needs SciPy, the extra `plan`."""
    found = [
        _Program(training, machine, budget_bytes, allowed, step_time).solve()
        for step_time in allowed.step_times(training)
    ]
    return tuple(sorted(found, key=lambda one: one.least_s))


def training_bound(training: Training, machine: TrainingMachine, budget_bytes: int, allowed: Allowed = EXACT) -> int:
    """The least time of a step in nanoseconds. See [Note: The relaxation]. Needs SciPy, the extra `plan`."""
    least_s = relaxations(training, machine, budget_bytes, allowed)[0].least_s
    least_ns = training.computing_ns - _cpu_savings_ns(training, allowed)
    return least_ns if math.isinf(least_s) else max(least_ns, round(least_s * (1 - _TOLERANCE) * 1e9))


def _cpu_savings_ns(training: Training, allowed: Allowed) -> int:
    """A step on the CPU takes no time of the device."""
    return sum(unit.step_ns for unit in training.units) if allowed.cpu_steps else 0


_Value = Callable[[_Effects], Any]


def _stacked(effects: Sequence[_Effects], keys: Sequence[_Key]) -> _Effects:
    """One for all, with an array in place of each number. Needs NumPy, which SciPy brings."""
    try:
        import numpy
    except ImportError:
        raise LibraryMissingError(what="the bound of a plan", library="scipy", extra="plan") from None
    needed = {key: numpy.zeros(len(effects)) for key in keys}
    for index, one in enumerate(effects):
        for key, nbytes in one.needed.items():
            needed[key][index] = nbytes

    def stack(name: str) -> Any:
        return numpy.array([getattr(one, name) for one in effects], dtype=float).T

    windows = (list(stack(name)) for name in ("computing", "to_device", "to_host", "cpu_before"))
    computing, to_device, to_host, cpu_before = windows
    return _Effects(needed, computing, to_device, to_host, stack("host"), stack("cpu"), cpu_before)


class _Program:
    def __init__(
        self,
        training: Training,
        machine: TrainingMachine,
        budget_bytes: int,
        allowed: Allowed,
        step_time: StepTime,
    ) -> None:
        self.training, self.machine, self.step_time = training, machine, step_time
        self.budget = budget_bytes / _GB
        self.program = LinearProgram()
        self.base_units = (UnitPlacement(),) * len(training.units)
        self.base_placement = Placement(self.base_units, step_time, slice_bytes=LEAST_SLICE)
        base = cycle_of(training, self.base_placement)
        self.windows = _windows_of(base)
        self.keys = list(dict.fromkeys(_keys(base)))
        self.window_of = dict(zip(self.keys, _by_key(base), strict=True))
        self.base = self._effects(base)
        self.columns: list[tuple[int, _Effects]] = []
        self.memory_rows: list[Row] = []
        self.time_rows: list[Row] = []
        self.room_s: list[float] = []
        self.durations: list[int] = []
        self.choices: list[list[tuple[UnitPlacement, int]]] = [[] for _ in training.units]
        for unit in range(len(training.units)):
            self._add_unit(unit, allowed)

    def _add_unit(self, unit: int, allowed: Allowed) -> None:
        choices = unit_choices(self.training, unit, allowed)
        moved = [one for one in choices if one.activations is Activations.KEEP and one != UnitPlacement()]
        fates = [
            UnitPlacement(fate)
            for fate in Activations
            if fate is not Activations.KEEP and UnitPlacement(fate) in choices
        ]
        for group in (moved, fates):
            if not group:
                continue
            columns = self.program.new_columns(len(group))
            without = self._effects(cycle_of(self.training, self.base_placement, unit))
            for column, one in zip(columns, group, strict=True):
                changed = replace(self.base_placement, units=with_unit(self.base_units, unit, one))
                self.columns.append((column, self._change(cycle_of(self.training, changed, unit), without)))
                self.choices[unit].append((one, column))
            self.program.require([(column, -1.0) for column in columns], -1.0)

    def _effects(self, cycle: Cycle) -> _Effects:
        keys, count = _keys(cycle), len(cycle.tasks)
        needed: dict[_Key, float] = {}
        for key, nbytes in zip(keys, cycle.needed_bytes, strict=True):
            needed.setdefault(key, nbytes / _GB)
        computing, to_device, to_host = ([0.0] * len(self.windows) for _ in range(3))
        for key, task in zip(keys, cycle.tasks, strict=True):
            computing[self.window_of[key]] += task.duration_ns / 1e9
        for move in cycle.ins:
            to_device[self.window_of[keys[move.task % count]]] += move.nbytes / _GB
        for move in cycle.outs:
            to_host[self.window_of[keys[move.task % count]]] += move.nbytes / _GB
        cpu = sum(self.training.units[unit].host_step_bytes for unit in cycle.cpu_steps) / _GB
        cpu_before = [0.0] * len(self.windows)
        for unit in cycle.cpu_steps if self.training.clips else ():
            window = self.window_of[TaskKind.FORWARD, unit, 0]
            cpu_before[window] += self.training.units[unit].host_step_bytes / _GB
        return _Effects(needed, computing, to_device, to_host, cycle.host_bytes / _GB, cpu, cpu_before)

    def _change(self, cycle: Cycle, without: _Effects) -> _Effects:
        """The effects of changing one unit. A task that the cycle does not have needs nothing."""
        one = self._effects(cycle)
        needed = {
            key: one.needed[key] - nbytes if key in one.needed else -self.base.needed[key]
            for key, nbytes in without.needed.items()
        }

        def changes(after: list[Any], before: list[Any]) -> list[Any]:
            return [one - other for one, other in zip(after, before, strict=True)]

        return _Effects(
            {key: change for key, change in needed.items() if change},
            changes(one.computing, without.computing),
            changes(one.to_device, without.to_device),
            changes(one.to_host, without.to_host),
            one.host - without.host,
            one.cpu - without.cpu,
            changes(one.cpu_before, without.cpu_before),
        )

    def solve(self) -> Relaxation:
        program = self.program
        self.stacked = _stacked([change for _, change in self.columns] + [self.base], self.keys)
        count = range(len(self.windows))
        self.computing = [self._sum(lambda one, index=index: one.computing[index]) for index in count]  # type: ignore[misc]
        durations = list(program.new_columns(len(self.windows), is_bounded=False))
        period = program.new_columns(1, is_bounded=False)[0]
        program.require([(period, 1.0), *((one, -1.0) for one in durations)], 0.0)
        for key in self.keys:
            self._is_at_most(self.budget, lambda one, key=key: one.needed.get(key, 0.0))  # type: ignore[misc]
        self._is_at_most(self.machine.host_bytes / _GB, lambda one: one.host)
        for index, duration in enumerate(durations):
            program.require(
                [(duration, 1.0), *((c, -f) for c, f in self.computing[index][1])], self.computing[index][0]
            )
        self.durations = durations
        self._lasts([], 1.0, lambda one: 0.0 * one.host)
        link, host_rate = self.machine.link, self.machine.host_bytes_per_s / _GB
        for span in self._spans():
            window = [durations[one] for one in span]
            is_whole = len(window) == len(durations)
            before = None if is_whole else self.windows[span[0]][0]
            after = None if is_whole else self.windows[span[-1]][1]

            def ins(one: _Effects, span: list[int] = span, before: _Key | None = before) -> Any:
                held = one.needed.get(before, 0.0) if before is not None else 0.0
                return sum([one.to_device[window] for window in span]) + held

            def outs(one: _Effects, span: list[int] = span, after: _Key | None = after) -> Any:
                held = one.needed.get(after, 0.0) if after is not None else 0.0
                return sum([one.to_host[window] for window in span]) + held

            spare = 0.0 if is_whole else self.budget
            self._lasts(window, link.to_device_bytes_per_s / _GB, ins, spare)
            self._lasts(window, link.to_host_bytes_per_s / _GB, outs, spare)
            both = min(link.duplex_bytes_per_s / _GB, host_rate)
            self._lasts(window, both, lambda one, i=ins, o=outs: i(one) + o(one), 2 * spare)  # type: ignore[misc]
        self._lasts(durations, host_rate, lambda one: sum(one.to_device) + sum(one.to_host) + one.cpu)
        self._lasts(durations, min(self.machine.cpu_bytes_per_s / _GB, host_rate), lambda one: one.cpu)
        # With clipping, the cores begin when backward has ended, and end before the forward that needs them.
        last_backward = max(w for key, w in self.window_of.items() if key[0] is TaskKind.BACKWARD)
        cpu_rate = min(self.machine.cpu_bytes_per_s / _GB, host_rate)
        for last in range(len(durations) if self.training.clips else 0):
            between = durations[last_backward + 1 :] + durations[: last + 1]
            if last >= last_backward:
                continue
            self._lasts(between, cpu_rate, lambda one, last=last: sum(one.cpu_before[: last + 1]))  # type: ignore[misc]
            moved = [*range(last_backward + 1, len(durations)), *range(last + 1)]
            before, after = self.windows[moved[0]][0], self.windows[last][1]

            def traffic(
                one: _Effects, last: int = last, moved: list[int] = moved, ends: tuple[_Key, _Key] = (before, after)
            ) -> Any:
                copies = sum(one.to_device[window] + one.to_host[window] for window in moved)
                return copies + sum(one.cpu_before[: last + 1]) + sum(one.needed.get(key, 0.0) for key in ends)

            self._lasts(between, host_rate, traffic, 2 * self.budget)
        try:
            least_s = program.least_of(period) or 0.0
        except LibraryMissingError:
            raise
        except VdnnError:  # no solution
            return Relaxation(self.step_time, math.inf, (), self._estimate())
        parts = tuple(tuple((one, program.values[column]) for one, column in choices) for choices in self.choices)
        return Relaxation(self.step_time, least_s, parts, self._estimate())

    def _estimate(self) -> Estimate:
        columns = [dict(choices) for choices in self.choices]
        return Estimate.of_rows(columns, self.memory_rows, self.time_rows, self.room_s)

    def _spans(self) -> Iterator[list[int]]:
        """All windows that follow each other, also around the end of the cycle."""
        count = len(self.windows)
        yield list(range(count))
        for first in range(count):
            for length in range(1, count):
                yield [(first + one) % count for one in range(length)]

    def _sum(self, value_of: _Value) -> tuple[float, list[tuple[int, float]]]:
        """The value of all units as they are without any change, and the change that each column makes."""
        values = value_of(self.stacked)
        changed = values[:-1].nonzero()[0]
        terms = zip(changed.tolist(), values[changed].tolist(), strict=True)
        return float(values[-1]), list(terms)

    def _is_at_most(self, most: float, value_of: _Value) -> None:
        base, terms = self._sum(value_of)
        self.program.require([(column, -factor) for column, factor in terms], base - most)
        self.memory_rows.append((base - most, terms))

    def _lasts(self, window: list[int], rate: float, value_of: _Value, spare: float = 0.0) -> None:
        """The window takes at least so long as its value, less `spare`, at this rate."""
        base, terms = self._sum(value_of)
        if terms or base:
            self.program.require([*((one, rate) for one in window), *((c, -f) for c, f in terms)], base - spare)
        # The estimate adds the other windows' computing.
        seconds, changes = (base - spare) / rate, {column: factor / rate for column, factor in terms}
        for index, duration in enumerate(self.durations):
            if duration not in window:
                seconds += self.computing[index][0]
                for column, factor in self.computing[index][1]:
                    changes[column] = changes.get(column, 0.0) + factor
        self.time_rows.append((seconds, list(changes.items())))
        self.room_s.append(spare / rate)


def _keys(cycle: Cycle) -> list[_Key]:
    return [(task.kind, task.unit, task.micro_batch) for task in cycle.tasks]


def _windows_of(cycle: Cycle) -> list[tuple[_Key, _Key]]:
    """Cuts the cycle where its phases change, and those in parts of about equal time. For each window, the task before
    it and the task after it."""
    keys = _keys(cycle)
    cuts = _cuts(cycle)
    return [(keys[begin - 1], keys[end % len(keys)]) for begin, end in zip(cuts, [*cuts[1:], len(keys)], strict=True)]


def _cuts(cycle: Cycle) -> list[int]:
    tasks, count = cycle.tasks, len(cycle.tasks)
    total = sum(task.duration_ns for task in tasks) or 1
    cuts, since = [0], 0
    for index in range(1, count):
        since += tasks[index - 1].duration_ns
        is_turn = tasks[index].kind is not tasks[index - 1].kind and TaskKind.BACKWARD in (
            tasks[index].kind,
            tasks[index - 1].kind,
        )
        # All slices of a unit's step are in one window.
        same_unit = tasks[index].unit == tasks[index - 1].unit and tasks[index].kind is TaskKind.STEP
        if (is_turn or since * _WINDOWS >= total) and not same_unit:
            cuts.append(index)
            since = 0
    return cuts


def _by_key(cycle: Cycle) -> list[int]:
    cuts = _cuts(cycle)
    found: dict[_Key, int] = {}
    for window, (begin, end) in enumerate(zip(cuts, [*cuts[1:], len(cycle.tasks)], strict=True)):
        for key in _keys(cycle)[begin:end]:
            found.setdefault(key, window)
    return list(found.values())
