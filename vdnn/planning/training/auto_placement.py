"""Searches the placement with the shortest step under a budget and a size of the host.

Small trainings are tried through. Larger ones have groups of equal units. In a group only the number of units of each
kind counts, with one of two orders: the search changes one number at a time and simulates each change. It begins from
the solution of the bound's linear program, if SciPy is installed, and from placements in which all units are alike.
Then it changes single units, and the size of the optimizer's slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, InvalidArgumentError, LibraryMissingError
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import (
    EXACT,
    LEAST_SLICE,
    Activations,
    Allowed,
    Placement,
    State,
    StepTime,
    UnitPlacement,
    unit_choices,
)
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training, TrainingMachine
from vdnn.planning.training.training_bound import Relaxation, relaxations

Kind = TypeVar("Kind")
_TRIED_THROUGH = 6_000  # placements
_WORK = 30_000  # tasks and moves of cycles that may be simulated
_TRIED = 6  # of the placements with the best estimates
_CLOSE = 0.002  # a step that is so near its bound is good enough
_SLICES = (LEAST_SLICE, 512 << 20, 1 << 30, 2 << 30)
_OVERLAPS = (1, 2, 4, 8)
_LINGERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SHAPES = (("linger", _LINGERS), ("linger_saves", _LINGERS), ("slice_bytes", _SLICES), ("overlap", _OVERLAPS))
_SEARCHED_LINGER = 0.5
_SEARCHED_SLICE = 1 << 30  # fewer tasks are simulated sooner
_WITHOUT_RECOMPUTE = {
    Activations.KEEP: Activations.KEEP,
    Activations.OFFLOAD: Activations.OFFLOAD,
    Activations.RECOMPUTE: Activations.KEEP,
    Activations.RECOMPUTE_FROM_HOST: Activations.OFFLOAD,
}
_ORDER = (Activations.OFFLOAD, Activations.RECOMPUTE_FROM_HOST, Activations.RECOMPUTE, Activations.KEEP)


def auto_placement(
    training: Training,
    machine: TrainingMachine,
    budget_bytes: int,
    allowed: Allowed = EXACT,
    starts: Sequence[Placement] = (),
) -> TrainingStep:
    """The best step found. `starts` are placements to begin from too. Raises BudgetError if not even the least memory
    fits the budget, and InvalidArgumentError if the host is too small."""
    search = _Search(training, machine, budget_bytes, allowed)
    count = 1
    for index in range(len(training.units)):
        count *= len(unit_choices(training, index, allowed))
    if count * len(allowed.step_times(training)) <= _TRIED_THROUGH:
        search.try_through()
    else:
        search.descend(starts)
    return search.answer()


class _Search:
    def __init__(self, training: Training, machine: TrainingMachine, budget_bytes: int, allowed: Allowed) -> None:
        self.training, self.machine, self.budget_bytes, self.allowed = training, machine, budget_bytes, allowed
        self.best: TrainingStep | None = None
        self.least_bytes: int | None = None
        self.least_host_bytes: int | None = None  # of those that fit the device
        self._seen: dict[Placement, tuple[float, float, int]] = {}
        self._work, self._bound_s = _WORK, 0.0

    def answer(self) -> TrainingStep:
        if self.best is not None:
            return self.best
        if self.least_host_bytes is not None:
            needed = self.least_host_bytes
            raise InvalidArgumentError(
                argument="host",
                expected=f"at least {format_bytes(needed)} ({needed} bytes) of memory for {self.training.name} under "
                f"{format_bytes(self.budget_bytes)} of the device",
                got=format_bytes(self.machine.host_bytes),
            )
        raise BudgetError(
            budget_bytes=self.budget_bytes,
            least_bytes=self.least_bytes or 0,
            where=f"a step of {self.training.name}",
            resident_bytes=self.training.fixed_bytes,
            way_out="Raise the budget, or take fewer tokens in a micro-batch",
        )

    def try_through(self) -> None:
        choices = [unit_choices(self.training, index, self.allowed) for index in range(len(self.training.units))]
        for step_time in self.allowed.step_times(self.training):
            for units in itertools.product(*choices):
                self.value_of(Placement(units, step_time))

    def value_of(self, placement: Placement) -> tuple[float, float, int]:
        """Smaller is better: first what is missing on the device and the host, then time, then bytes moved."""
        known = self._seen.get(placement)
        if known is not None:
            return known
        cycle = cycle_of(self.training, placement)
        peak = max(cycle.needed_bytes)
        over = max(0, peak - self.budget_bytes)
        host_over = max(0, cycle.host_bytes - self.machine.host_bytes)
        if self.least_bytes is None or peak < self.least_bytes:
            self.least_bytes = peak
        if not over and (self.least_host_bytes is None or cycle.host_bytes < self.least_host_bytes):
            self.least_host_bytes = cycle.host_bytes
        if over or host_over:
            value = (float(over + host_over), float("inf"), 0)
        else:
            step = simulate_training(self.training, self.machine, placement, self.budget_bytes)
            self._work -= len(cycle.tasks) + len(cycle.ins) + len(cycle.outs)
            value = (0.0, float(step.step_ns), step.to_device_bytes + step.to_host_bytes)
            if self.best is None or value[1:] < _value(self.best):
                self.best = step
        self._seen[placement] = value
        return value

    def descend(self, starts: Sequence[Placement]) -> None:
        self._work = _WORK
        alike = [UnitPlacement(), UnitPlacement(Activations.RECOMPUTE_FROM_HOST, True, True, State.HOST)]
        if self.allowed.cpu_steps:
            alike.append(UnitPlacement(Activations.RECOMPUTE_FROM_HOST, True, True, State.CPU))
        for one in (*alike, *self._more_alike()):
            self.value_of(_Mix.of_alike(self.training, one, StepTime.END).placement())
        if self._is_best(self.training.computing_ns) and not self.allowed.cpu_steps:
            return
        for start in starts:
            if start.step_time in self.allowed.step_times(self.training):
                self.value_of(start)
        try:
            relaxed: Sequence[Relaxation] = relaxations(
                self.training, self.machine, self.budget_bytes, self.allowed
            )
        except LibraryMissingError:
            relaxed = ()
        if relaxed:
            self._bound_s = relaxed[0].least_s
        for one in relaxed:
            if one.parts and (self.best is None or one.least_s * 1e9 < self.best.step_ns):
                self._descend_by(one, alike)
        if not relaxed:
            for step_time in self.allowed.step_times(self.training):
                for placement in alike:
                    self._descend_from(_Mix.of_alike(self.training, placement, step_time), None)
        self._change_shape()

    def _more_alike(self) -> list[UnitPlacement]:
        """Placements that often fit at once, beside those from which the search descends."""
        fates = (Activations.KEEP, Activations.OFFLOAD, Activations.RECOMPUTE)
        return [
            UnitPlacement(fate, streams, state is not State.DEVICE, state)
            for fate in fates
            for streams in (False, True)
            for state in ((State.DEVICE, State.HOST, State.CPU) if self.allowed.cpu_steps else (State.DEVICE, State.HOST))
        ]

    def _is_best(self, bound_ns: float) -> bool:
        return self.best is not None and self.best.step_ns <= bound_ns * (1 + _CLOSE)

    def _descend_by(self, relaxed: Relaxation, alike: Sequence[UnitPlacement]) -> None:
        """Descends by the estimate alone, from several starts, and from the best of what it finds by simulations."""
        found: dict[_Mix, tuple[float, float]] = {}
        starts = [_Mix.of_relaxation(self.training, relaxed)]
        starts += [_Mix.of_alike(self.training, one, relaxed.step_time) for one in alike]
        if self.best is not None and self.best.placement.step_time is relaxed.step_time:
            units = self.best.placement.units
            starts.append(_Mix.of_units(self.training, units, relaxed.step_time))
        for start in starts:
            for spreads in (True, False):
                mix = replace(start, spreads=spreads)
                found[mix] = relaxed.estimate.of(mix.placement().units)
                for stride in _strides(len(self.training.units)):
                    mix = self._best_by_estimate(mix, stride, relaxed, found)
        best = sorted(found.items(), key=lambda item: item[1])
        for mix, (_, least_s) in best[:_TRIED]:
            if self.best is None or least_s * 1e9 < self.best.step_ns:
                self.value_of(mix.placement())
        start = self._best_mix(found, relaxed.step_time)
        self._descend_from(start if start is not None else best[0][0], relaxed)

    def _best_mix(self, found: Iterable[_Mix], step_time: StepTime) -> _Mix | None:
        if self.best is None or self.best.placement.step_time is not step_time:
            return None
        units = self.best.placement.units
        return next((mix for mix in found if mix.placement().units == units), None)

    def _best_by_estimate(
        self, mix: _Mix, stride: int, relaxed: Relaxation, found: dict[_Mix, tuple[float, float]]
    ) -> _Mix:
        while True:
            for other in mix.neighbours(self.allowed, stride):
                if other not in found:
                    found[other] = relaxed.estimate.of(other.placement().units)
                if found[other] < found[mix]:
                    mix = other
                    break
            else:
                return mix

    def _descend_from(self, mix: _Mix, relaxed: Relaxation | None) -> None:
        value = self.value_of(mix.placement())
        for stride in _strides(len(self.training.units)):
            changed = True
            while changed and self._work > 0 and not self._is_best(self._bound_s * 1e9):
                changed = False
                for other in mix.neighbours(self.allowed, stride):
                    placement = other.placement()
                    if relaxed is not None and self.best is not None:
                        over, least_s = relaxed.estimate.of(placement.units)
                        if over > 1e-6 or least_s * 1e9 >= self.best.step_ns:
                            continue
                    found = self.value_of(placement)
                    if found < value:
                        mix, value, changed = other, found, True
                        break
                    if self._work <= 0:
                        break

    def _change_shape(self) -> None:
        """Tries other slices of the optimizer's step and other times for copies to the host."""
        for name, values in _SHAPES:
            for value in values:
                if self.best is not None and not self._is_best(self._bound_s * 1e9):
                    self.value_of(replace(self.best.placement, **{name: value}))


def _strides(count: int) -> Iterator[int]:
    stride = max(1, count // 2)
    while stride:
        yield stride
        stride //= 2


def _value(step: TrainingStep) -> tuple[float, int]:
    return float(step.step_ns), step.to_device_bytes + step.to_host_bytes


_Parts = Sequence[tuple[UnitPlacement, float]]


@dataclass(frozen=True)
class _Counts:
    """How many of a group's units have each kind: the numbers of `activations` are in the order of _ORDER, of which the
    group has the first `fates`."""

    activations: tuple[int, int, int]
    streams: int
    gradients: int
    on_host: int
    on_cpu: int
    fates: int


@dataclass(frozen=True)
class _Mix:
    """Counts for each group of equal units. `spreads`: the kinds alternate; otherwise those that leave come first."""

    groups: tuple[tuple[int, ...], ...]
    counts: tuple[_Counts, ...]
    step_time: StepTime
    spreads: bool

    @staticmethod
    def of_alike(training: Training, one: UnitPlacement, step_time: StepTime) -> _Mix:
        return _Mix._of(training, [((one, 1.0),)] * len(training.units), step_time)

    @staticmethod
    def of_units(training: Training, units: Sequence[UnitPlacement], step_time: StepTime) -> _Mix:
        return _Mix._of(training, [((one, 1.0),) for one in units], step_time)

    @staticmethod
    def of_relaxation(training: Training, relaxed: Relaxation) -> _Mix:
        return _Mix._of(training, relaxed.parts, relaxed.step_time)

    @staticmethod
    def _of(training: Training, parts: Sequence[Sequence[tuple[UnitPlacement, float]]], step_time: StepTime) -> _Mix:
        found: dict[object, list[int]] = {}
        for index, unit in enumerate(training.units):
            found.setdefault(replace(unit, name=""), []).append(index)
        groups = tuple(tuple(members) for members in found.values())
        counts = []
        for members in groups:
            unit, here = training.units[members[0]], [part for index in members for part in parts[index]]

            def number(holds: Callable[[UnitPlacement], bool], here: _Parts = here, size: int = len(members)) -> int:
                return min(size, round(sum(fraction for one, fraction in here if holds(one))))

            saves = unit.saved_bytes > unit.boundary_bytes  # with a recompute
            if not saves:
                here = [(replace(one, activations=_WITHOUT_RECOMPUTE[one.activations]), part) for one, part in here]

                def number(holds: Callable[[UnitPlacement], bool], here: _Parts = here, size: int = len(members)) -> int:
                    return min(size, round(sum(fraction for one, fraction in here if holds(one))))

            left, fates = len(members), []
            for fate in _ORDER[:3]:
                fates.append(min(left, number(lambda one, fate=fate: one.activations is fate)))  # type: ignore[misc]
                left -= fates[-1]
            on_cpu = number(lambda one: one.state is State.CPU)
            counts.append(
                _Counts(
                    (fates[0], fates[1], fates[2]) if unit.saved_bytes else (0, 0, 0),
                    number(lambda one: one.streams) if unit.parameter_bytes else 0,
                    number(lambda one: one.gradient_leaves) if unit.gradient_bytes else 0,
                    min(len(members) - on_cpu, number(lambda one: one.state is State.HOST))
                    if unit.gradient_bytes
                    else 0,
                    on_cpu if unit.gradient_bytes else 0,
                    3 if saves else 1 if unit.saved_bytes else 0,
                )
            )
        return _Mix(groups, tuple(counts), step_time, spreads=True)

    def placement(self) -> Placement:
        units: list[UnitPlacement] = [UnitPlacement()] * sum(len(members) for members in self.groups)
        for members, counts in zip(self.groups, self.counts, strict=True):
            size = len(members)
            kept = size - sum(counts.activations)
            fates = _dealt((*counts.activations, kept), _ORDER, spreads=self.spreads)
            streams = _dealt((counts.streams, size - counts.streams), (True, False), spreads=True)
            # Those on the CPU come last: they have until their forward.
            states = _dealt(
                (size - counts.on_cpu - counts.on_host, counts.on_host, counts.on_cpu),
                (State.DEVICE, State.HOST, State.CPU),
                spreads=self.spreads,
            )
            # Gradients leave first where the step is on the CPU, then where the state leaves.
            ranks = sorted(range(size), key=lambda i: list(State).index(states[i]), reverse=True)
            leaving = set(ranks[: max(counts.gradients, counts.on_cpu)])
            for place, index in enumerate(members):
                units[index] = UnitPlacement(fates[place], streams[place], place in leaving, states[place])
        return Placement(tuple(units), self.step_time, _SEARCHED_SLICE, 1, _SEARCHED_LINGER, _SEARCHED_LINGER)

    def neighbours(self, allowed: Allowed, stride: int) -> Iterator[_Mix]:
        yield replace(self, spreads=not self.spreads)
        for group, (members, counts) in enumerate(zip(self.groups, self.counts, strict=True)):
            for changed in _changes(counts, len(members), allowed, stride):
                yield replace(self, counts=(*self.counts[:group], changed, *self.counts[group + 1 :]))


def _changes(counts: _Counts, size: int, allowed: Allowed, stride: int) -> Iterator[_Counts]:
    for sign in (-stride, stride):
        for kind in range(counts.fates):
            numbers = list(counts.activations)
            numbers[kind] += sign
            for other in range(counts.fates):
                exchanged = list(numbers)
                if other != kind:
                    exchanged[other] -= sign
                if min(exchanged) >= 0 and sum(exchanged) <= size:
                    yield replace(counts, activations=(exchanged[0], exchanged[1], exchanged[2]))
        for name in ("streams", "gradients", "on_host", "on_cpu"):
            if name == "on_cpu" and not allowed.cpu_steps:
                continue
            changed = replace(counts, **{name: min(size, max(0, getattr(counts, name) + sign))})
            if changed != counts and changed.on_host + changed.on_cpu <= size:
                yield changed
        both = replace(counts, on_host=counts.on_host + sign, gradients=min(size, max(0, counts.gradients + sign)))
        if both.on_host >= 0 and both.on_host + both.on_cpu <= size:
            yield both
        if allowed.cpu_steps:
            moved = replace(counts, on_host=counts.on_host - sign, on_cpu=counts.on_cpu + sign)
            if min(moved.on_host, moved.on_cpu) >= 0:
                yield moved


def _dealt(numbers: Sequence[int], kinds: Sequence[Kind], *, spreads: bool) -> list[Kind]:
    """So many of each kind, in blocks or spread evenly."""
    size = sum(numbers)
    if not spreads:
        return [kind for kind, number in zip(kinds, numbers, strict=True) for _ in range(number)]
    given, dealt = [0] * len(numbers), []
    for place in range(size):
        behind = [number * (place + 1) / size - done for number, done in zip(numbers, given, strict=True)]
        chosen = max(range(len(numbers)), key=lambda kind: (behind[kind], -kind))
        given[chosen] += 1
        dealt.append(kinds[chosen])
    return dealt
