"""Placements in which only the number of units of each kind counts, in each group of equal units.

An order says which units of a group have which kind. A search changes one number, or the order, at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from vdnn.planning.training.estimate import Estimate
from vdnn.planning.training.placement import Activations, Allowed, Placement, State, StepTime, UnitPlacement
from vdnn.planning.training.training import Training, Unit
from vdnn.planning.training.training_bound import Relaxation

Kind = TypeVar("Kind")
_SEARCHED_SLICE = 1 << 30  # fewer tasks are simulated sooner
_SEARCHED_LINGER = 0.5
_WITHOUT_RECOMPUTE = {
    Activations.KEEP: Activations.KEEP,
    Activations.OFFLOAD: Activations.OFFLOAD,
    Activations.RECOMPUTE: Activations.KEEP,
    Activations.RECOMPUTE_FROM_HOST: Activations.OFFLOAD,
}
_ORDER = (Activations.OFFLOAD, Activations.RECOMPUTE_FROM_HOST, Activations.RECOMPUTE, Activations.KEEP)


class Order(Enum):
    """Which units of a group have which kind."""

    __hash__ = object.__hash__  # Enum's own is slow
    ALTERNATING = "the kinds alternate"
    LEAVING_FIRST = "activations and states that leave come first; the units that stream alternate with the others"
    STAYING_FIRST = "the first units stay; activations that leave come first, and alternate with those recomputed"


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
class Mix:
    """Counts for each group of equal units, and the order in each group."""

    groups: tuple[tuple[int, ...], ...] = field(compare=False)  # all mixes of a search have the same
    counts: tuple[_Counts, ...]
    step_time: StepTime
    order: Order

    @staticmethod
    def of_alike(training: Training, one: UnitPlacement, step_time: StepTime) -> Mix:
        return Mix._of(training, [((one, 1.0),)] * len(training.units), step_time)

    @staticmethod
    def of_units(training: Training, units: Sequence[UnitPlacement], step_time: StepTime) -> Mix:
        return Mix._of(training, [((one, 1.0),) for one in units], step_time)

    @staticmethod
    def of_relaxation(training: Training, relaxed: Relaxation) -> Mix:
        return Mix._of(training, relaxed.parts, relaxed.step_time)

    @staticmethod
    def _of(training: Training, parts: Sequence[Sequence[tuple[UnitPlacement, float]]], step_time: StepTime) -> Mix:
        found: dict[object, list[int]] = {}
        for index, unit in enumerate(training.units):
            found.setdefault(replace(unit, name=""), []).append(index)
        groups = tuple(tuple(members) for members in found.values())
        counts = []
        for members in groups:
            here = [part for index in members for part in parts[index]]
            counts.append(_counts_of(training.units[members[0]], len(members), here))
        return Mix(groups, tuple(counts), step_time, Order.ALTERNATING)

    def placement(self) -> Placement:
        units: list[UnitPlacement] = [UnitPlacement()] * sum(len(members) for members in self.groups)
        for members, counts in zip(self.groups, self.counts, strict=True):
            for index, one in zip(members, _units_of(counts, len(members), self.order), strict=True):
                units[index] = one
        return Placement(tuple(units), self.step_time, _SEARCHED_SLICE, 1, _SEARCHED_LINGER, _SEARCHED_LINGER)

    def neighbours(self, allowed: Allowed, stride: int) -> Iterator[Mix]:
        for order in Order:
            if order is not self.order:
                yield replace(self, order=order)
        for group, (members, counts) in enumerate(zip(self.groups, self.counts, strict=True)):
            for changed in _changes(counts, len(members), allowed, stride):
                yield replace(self, counts=(*self.counts[:group], changed, *self.counts[group + 1 :]))


class MixEstimate:
    """Estimates of mixes. The contribution of a group is kept once it was computed."""

    def __init__(self, estimate: Estimate) -> None:
        self.estimate = estimate
        self._groups: dict[tuple[int, _Counts, Order], tuple[Any, Any]] = {}

    def of(self, mix: Mix) -> tuple[float, float, float]:
        """As Estimate.rank()."""
        memory: Any = 0.0
        seconds: Any = 0.0
        for group, (members, counts) in enumerate(zip(mix.groups, mix.counts, strict=True)):
            key = group, counts, mix.order
            known = self._groups.get(key)
            if known is None:
                units = _units_of(counts, len(members), mix.order)
                known = self._groups[key] = self.estimate.changes(zip(members, units, strict=True))
            memory, seconds = memory + known[0], seconds + known[1]
        return self.estimate.rank(memory, seconds)


@functools.lru_cache(maxsize=4096)
def _units_of(counts: _Counts, size: int, order: Order) -> tuple[UnitPlacement, ...]:
    """The units of a group. Those that step on the CPU come last: they have until their forward."""
    kept, resident = size - sum(counts.activations), size - counts.on_cpu - counts.on_host
    homes, states = (resident, counts.on_host, counts.on_cpu), (State.DEVICE, State.HOST, State.CPU)
    if order is Order.STAYING_FIRST:
        moved = [(number, fate) for number, fate in zip(counts.activations, _ORDER, strict=False) if number]
        fates = _dealt([one for one, _ in moved], [fate for _, fate in moved], spreads=True)
        fates += [Activations.KEEP] * kept
        streams = _dealt((size - counts.streams, counts.streams), (False, True), spreads=False)
        places = _dealt(homes, states, spreads=False)
    else:
        spreads = order is Order.ALTERNATING
        fates = _dealt((*counts.activations, kept), _ORDER, spreads=spreads)
        streams = _dealt((counts.streams, size - counts.streams), (True, False), spreads=True)
        places = _dealt(homes, states, spreads=spreads)
    # Gradients leave first where the step is on the CPU, then where the state leaves.
    ranks = sorted(range(size), key=lambda i: states.index(places[i]), reverse=True)
    leaving = set(ranks[: max(counts.gradients, counts.on_cpu)])
    return tuple(UnitPlacement(fates[i], streams[i], i in leaving, places[i]) for i in range(size))


def _counts_of(unit: Unit, size: int, parts: _Parts) -> _Counts:
    """Whole numbers near the sums of the parts, as far as the unit has what they place."""
    recomputes = unit.saved_bytes > unit.boundary_bytes
    if not recomputes:
        parts = [(replace(one, activations=_WITHOUT_RECOMPUTE[one.activations]), part) for one, part in parts]

    def number(holds: Callable[[UnitPlacement], bool]) -> int:
        return min(size, round(sum(fraction for one, fraction in parts if holds(one))))

    left, numbers = size if unit.saved_bytes else 0, []
    for fate in _ORDER[:3]:
        numbers.append(min(left, number(lambda one, fate=fate: one.activations is fate)))  # type: ignore[misc]
        left -= numbers[-1]
    on_cpu = on_host = gradients = 0
    if unit.gradient_bytes:
        on_cpu = number(lambda one: one.state is State.CPU)
        on_host = min(size - on_cpu, number(lambda one: one.state is State.HOST))
        gradients = number(lambda one: one.gradient_leaves)
    return _Counts(
        activations=(numbers[0], numbers[1], numbers[2]),
        streams=number(lambda one: one.streams) if unit.parameter_bytes else 0,
        gradients=gradients,
        on_host=on_host,
        on_cpu=on_cpu,
        fates=3 if recomputes else 1 if unit.saved_bytes else 0,
    )


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
    """The number of units of each kind, in blocks or spread evenly."""
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
