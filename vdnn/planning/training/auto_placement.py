"""Searches the placement with the shortest step under a budget and a size of the host.

Small trainings are tried through. Larger ones have groups of equal units. In a group only the number of units of each
kind counts, with one of two orders: the search changes one number at a time and simulates each change. It begins from
the solution of the bound's linear program, if SciPy is installed, and from placements in which all units are alike.
Then it changes the size of the optimizer's slices, and single units and pairs of them where the work allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, InvalidArgumentError, LibraryMissingError
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.mix import Mix, MixEstimate, Order
from vdnn.planning.training.persistent_units import alternating_fates, persistent_homes, with_fates
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
    with_unit,
)
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training, TrainingMachine
from vdnn.planning.training.training_bound import Relaxation, relaxations

_TRIED_THROUGH = 6_000  # placements
_WORK = 30_000  # tasks and moves of cycles that may be simulated
_TRIED = 6  # of the placements with the best estimates
_NOTHING_GB = 1e-6  # an estimate may be so much over the budget
_CLOSE = 0.002  # a step that is so near its bound is good enough
_SLICES = (LEAST_SLICE, 512 << 20, 1 << 30, 2 << 30)
_OVERLAPS = (1, 2, 4, 8)
_LINGERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SEARCHED_SHAPE = ("linger", "linger_saves", "overlap")
_SHAPES: tuple[list[dict[str, float]], ...] = (
    [{"linger": share} for share in _LINGERS],
    [{"linger_saves": share} for share in _LINGERS],
    [{"slice_bytes": nbytes} for nbytes in _SLICES],
    [{"overlap": tasks} for tasks in _OVERLAPS],
)


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
        for unit in (*alike, *self._more_alike()):
            self.value_of(Mix.of_alike(self.training, unit, StepTime.END).placement())
        if self._is_best(self.training.computing_ns) and not self.allowed.cpu_steps:
            return
        for start in starts:
            if start.step_time in self.allowed.step_times(self.training):
                self.value_of(start)
        try:
            relaxed: Sequence[Relaxation] = relaxations(self.training, self.machine, self.budget_bytes, self.allowed)
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
                    self._descend_from(Mix.of_alike(self.training, placement, step_time), None)
        self._change_shape()
        self._change_units(1)
        self._change_units(2)

    def _more_alike(self) -> list[UnitPlacement]:
        """Placements that often fit at once, beside those from which the search descends."""
        fates = (Activations.KEEP, Activations.OFFLOAD, Activations.RECOMPUTE)
        return [
            UnitPlacement(fate, streams, state is not State.DEVICE, state)
            for fate in fates
            for streams in (False, True)
            for state in (
                (State.DEVICE, State.HOST, State.CPU) if self.allowed.cpu_steps else (State.DEVICE, State.HOST)
            )
        ]

    def _is_best(self, bound_ns: float) -> bool:
        return self.best is not None and self.best.step_ns <= bound_ns * (1 + _CLOSE)

    def _descend_by(self, relaxed: Relaxation, alike: Sequence[UnitPlacement]) -> None:
        """Descends by the estimate alone, from several starts, and from the best of what it finds by simulations."""
        found: dict[Mix, tuple[float, float, float]] = {}
        starts = [Mix.of_relaxation(self.training, relaxed)]
        starts += [Mix.of_alike(self.training, one, relaxed.step_time) for one in alike]
        if self.best is not None and self.best.placement.step_time is relaxed.step_time:
            units = self.best.placement.units
            starts.append(Mix.of_units(self.training, units, relaxed.step_time))
        persistent = self._persistent(relaxed)
        estimates = MixEstimate(relaxed.estimate)
        pairs = [(mix, order) for mix in starts for order in Order]
        pairs = [(replace(mix, order=order), order) for mix, order in pairs]
        pairs += [(self._staying_first(one.units, one.step_time), Order.STAYING_FIRST) for one in persistent]
        for mix, _ in pairs:
            found[mix] = estimates.of(mix)
            for stride in _strides(len(self.training.units)):
                mix = self._best_by_estimate(mix, stride, estimates, found)
        best = sorted(found.items(), key=lambda item: item[1])
        tried = [mix for mix, _ in best[:_TRIED]]
        tried += [mix for mix, order in pairs[-len(persistent) :] if mix in found and order is Order.STAYING_FIRST]
        for mix in dict.fromkeys(tried):
            over, _, least_s = found[mix]
            if over <= _NOTHING_GB and (self.best is None or least_s * 1e9 < self.best.step_ns):
                self.value_of(mix.placement())
        for placement in persistent:
            self.value_of(placement)
        self._change_shape()
        self._descend_from(self._best_mix(found, relaxed.step_time) or best[0][0], relaxed)

    def _persistent(self, relaxed: Relaxation) -> list[Placement]:
        """The best estimated placements in which the first units stay, as published systems place them, for each place
        of the step."""
        fates = [
            one
            for again in (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST)
            for one in alternating_fates(self.training, Activations.OFFLOAD, again)
        ]
        chosen: list[Placement] = []
        for state in (State.HOST, State.CPU) if self.allowed.cpu_steps else (State.HOST,):
            homes = persistent_homes(self.training, state)
            found = sorted(relaxed.estimate.of_products(homes, fates))
            chosen += [
                Placement(with_fates(homes[home], fates[fate]), relaxed.step_time)
                for (over, _, least_s), home, fate in found[: _TRIED // 2]
                if over <= _NOTHING_GB and (self.best is None or least_s * 1e9 < self.best.step_ns)
            ]
        return chosen

    def _staying_first(self, units: Sequence[UnitPlacement], step_time: StepTime) -> Mix:
        return replace(Mix.of_units(self.training, units, step_time), order=Order.STAYING_FIRST)

    def _best_mix(self, found: Iterable[Mix], step_time: StepTime) -> Mix | None:
        if self.best is None or self.best.placement.step_time is not step_time:
            return None
        units = self.best.placement.units
        return next((mix for mix in found if mix.placement().units == units), None)

    def _best_by_estimate(
        self, mix: Mix, stride: int, estimates: MixEstimate, found: dict[Mix, tuple[float, float, float]]
    ) -> Mix:
        while True:
            for other in mix.neighbours(self.allowed, stride):
                if other not in found:
                    found[other] = estimates.of(other)
                if found[other] < found[mix]:
                    mix = other
                    break
            else:
                return mix

    def _descend_from(self, mix: Mix, relaxed: Relaxation | None) -> None:
        shape = {} if self.best is None else {name: getattr(self.best.placement, name) for name in _SEARCHED_SHAPE}
        value = self.value_of(replace(mix.placement(), **shape))
        for stride in _strides(len(self.training.units)):
            changed = True
            while changed and self._work > 0 and not self._is_best(self._bound_s * 1e9):
                changed = False
                for other in mix.neighbours(self.allowed, stride):
                    placement = replace(other.placement(), **shape)
                    if relaxed is not None and self.best is not None:
                        over, least_s = relaxed.estimate.of(placement.units)
                        if over > _NOTHING_GB or least_s * 1e9 >= self.best.step_ns:
                            continue
                    found = self.value_of(placement)
                    if found < value:
                        mix, value, changed = other, found, True
                        break
                    if self._work <= 0:
                        break

    def _change_shape(self) -> None:
        """Tries other slices of the optimizer's step and other times for copies to the host."""
        for shapes in _SHAPES:
            for shape in shapes:
                if self.best is not None and not self._is_best(self._bound_s * 1e9):
                    self.value_of(replace(self.best.placement, **shape))  # type: ignore[arg-type]

    def _change_units(self, together: int) -> None:
        """Leaves the groups: tries all placements of so many units together, if the work that is left is enough."""
        choices = [unit_choices(self.training, index, self.allowed) for index in range(len(self.training.units))]
        chosen = list(itertools.combinations(range(len(choices)), together))
        if sum(math.prod(len(choices[index]) for index in indices) for indices in chosen) > self._work:
            return
        changes = [
            list(zip(indices, ones, strict=True))
            for indices in chosen
            for ones in itertools.product(*(choices[index] for index in indices))
        ]
        improved = True
        while improved and self.best is not None:
            improved = False
            for change in changes:
                if self._work <= 0 or self._is_best(self._bound_s * 1e9):
                    return
                best, units = self.best, self.best.placement.units
                for index, one in change:
                    units = with_unit(units, index, one)
                self.value_of(replace(best.placement, units=units))
                improved = improved or self.best is not best


def _strides(count: int) -> Iterator[int]:
    stride = max(1, count // 2)
    while stride:
        yield stride
        stride //= 2


def _value(step: TrainingStep) -> tuple[float, int]:
    return float(step.step_ns), step.to_device_bytes + step.to_host_bytes
