"""Searches the placement with the shortest step under a budget and a size of the host.

Small trainings are tried through. Larger ones have groups of equal units. In a group only the number of units of each
kind counts, with one of a few orders: the search changes one number at a time and simulates what its estimate does not
rule out. It begins from the solution of the bound's linear program, if SciPy is installed, from placements in which all
units are alike, and from those in which the first units stay. In between it changes when copies give back their memory,
and at the end the size of the optimizer's slices, and single units and pairs of them where the work allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vdnn.errors import BudgetError, InvalidArgumentError, LibraryMissingError
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
from vdnn.planning.training.simulate_cycle import TrainingStep
from vdnn.planning.training.training import Training, TrainingMachine
from vdnn.planning.training.training_bound import Relaxation, relaxations, training_bound
from vdnn.planning.training.trials import Trials

_TRIED_THROUGH = 6_000  # placements
_WORK = 1_000_000  # tasks and moves of cycles that may be simulated
_WORK_OF_THE_FIRST = 0.7  # of it, for the first of several times of the step
_SHARE_OF_FREEDOMS = 0.7  # of the progress of a search with freedoms, and of the exact one that may follow
_TRIED = 8  # of the placements with the best estimates
_LESS = (0.97, 0.93, 0.85)  # of the budget
_DESCENTS = 16  # from the best of those that were simulated
_TRIED_OF_EACH = 2  # of those that differ only in the fates of activations
_NOTHING_GB = 1e-6  # an estimate may be this much over the budget
_CLOSE = 0.002  # a step that is so near its bound is good enough
_SLICES = (LEAST_SLICE, 512 << 20, 1 << 30, 2 << 30)
_OVERLAPS = (1, 2, 4, 8)
_ROOM_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_SEARCHED_SHAPE = ("room_share_of_steps", "room_share_of_passes", "overlap")
_ROOMS: tuple[list[dict[str, Any]], ...] = (
    [{"room_share_of_steps": share} for share in _ROOM_SHARES],
    [{"room_share_of_passes": share} for share in _ROOM_SHARES],
    [{"overlap": tasks} for tasks in _OVERLAPS],
)
_SHAPES = (*_ROOMS, [{"slice_bytes": nbytes} for nbytes in _SLICES], *_ROOMS)


def auto_placement(
    training: Training,
    machine: TrainingMachine,
    budget_bytes: int,
    allowed: Allowed = EXACT,
    starts: Sequence[Placement] = (),
    on_progress: Callable[[float], None] = lambda share: None,
) -> TrainingStep:
    """The best step found: with more freedoms never a slower one than without. `starts` are placements to begin from
    too. `on_progress` is called with the share of the work that is done. Raises BudgetError if not even the least
    memory fits the budget, and InvalidArgumentError if the host is too small."""

    def search_within(within: Allowed, first: float, last: float) -> _Search:
        trials = Trials(
            training,
            machine,
            budget_bytes,
            most_work=_WORK,
            on_progress=lambda share: on_progress(first + (last - first) * share),
        )
        return _Search(trials, within)

    def searched(within: Allowed, first: float, last: float) -> TrainingStep:
        search = search_within(within, first, last)
        search.descend([start for start in starts if within.permits(start, training)])
        return search.trials.answer()

    count = 1
    for index in range(len(training.units)):
        count *= len(unit_choices(training, index, allowed))
    if count * len(allowed.step_times(training)) <= _TRIED_THROUGH:
        search = search_within(allowed, 0.0, 1.0)
        search.try_through()
        return search.trials.answer()
    if allowed == EXACT:
        return searched(EXACT, 0.0, 1.0)
    step = searched(allowed, 0.0, _SHARE_OF_FREEDOMS)
    if _is_faster_than_exact(step, training, machine, budget_bytes):
        return step
    try:
        exact = searched(EXACT, _SHARE_OF_FREEDOMS, 1.0)
    except (BudgetError, InvalidArgumentError):  # what fits may need a freedom
        return step
    return min(step, exact, key=lambda one: one.step_ns)


def _is_faster_than_exact(step: TrainingStep, training: Training, machine: TrainingMachine, budget_bytes: int) -> bool:
    """True if no step can be faster without the freedoms."""
    try:
        return step.step_ns <= training_bound(training, machine, budget_bytes)
    except LibraryMissingError:
        return False


class _Search:
    def __init__(self, trials: Trials, allowed: Allowed) -> None:
        self.trials, self.training, self.allowed = trials, trials.training, allowed
        self._bound_s = 0.0
        self._least_work = 0  # the search of one time of the step leaves this much to the others

    def try_through(self) -> None:
        choices = [unit_choices(self.training, index, self.allowed) for index in range(len(self.training.units))]
        for step_time in self.allowed.step_times(self.training):
            for units in itertools.product(*choices):
                self.trials.value_of(Placement(units, step_time))

    def descend(self, starts: Sequence[Placement]) -> None:
        trials = self.trials
        alike = [UnitPlacement(), UnitPlacement(Activations.RECOMPUTE_FROM_HOST, True, True, State.HOST)]
        if self.allowed.cpu_steps:
            alike.append(UnitPlacement(Activations.RECOMPUTE_FROM_HOST, True, True, State.CPU))
        for unit in (*alike, *self._more_alike()):
            trials.value_of(Mix.of_alike(self.training, unit, StepTime.END).placement())
        if self._is_best(self.training.kept_ns) and not self.allowed.cpu_steps:
            return
        for start in starts:
            trials.value_of(start)
            trials.value_of(replace(start, room_bytes=None))
        try:
            relaxed: Sequence[Relaxation] = relaxations(
                self.training, trials.machine, trials.budget_bytes, self.allowed
            )
        except LibraryMissingError:
            relaxed = ()
        if relaxed:
            self._bound_s = relaxed[0].least_s
        for place, one in enumerate(relaxed):
            if one.parts and self._may_be_better(one.least_s):
                share = 1 - _WORK_OF_THE_FIRST if place + 1 < len(relaxed) else 0.0
                self._least_work = int(share * trials.most_work)
                self._descend_by(one, alike)
        if not relaxed:
            for step_time in self.allowed.step_times(self.training):
                for placement in alike:
                    self._descend_from(Mix.of_alike(self.training, placement, step_time), None)
        self._least_work = 0
        self._change_shape(_SHAPES)
        self._change_units(1)
        self._change_units(2)

    def _more_alike(self) -> list[UnitPlacement]:
        """Placements that often fit at once, beside those from which the search descends."""
        states = (State.DEVICE, State.HOST, State.CPU) if self.allowed.cpu_steps else (State.DEVICE, State.HOST)
        return [
            UnitPlacement(fate, streams, state is not State.DEVICE, state)
            for fate in (Activations.KEEP, Activations.OFFLOAD, Activations.RECOMPUTE)
            for streams in (False, True)
            for state in states
        ]

    def _is_best(self, bound_ns: float) -> bool:
        best = self.trials.best
        return best is not None and best.step_ns <= bound_ns * (1 + _CLOSE)

    def _may_be_better(self, least_s: float) -> bool:
        return self.trials.best is None or least_s * 1e9 < self.trials.best.step_ns

    def _is_over(self) -> bool:
        return self.trials.work <= self._least_work or self._is_best(self._bound_s * 1e9)

    def _descend_by(self, relaxed: Relaxation, alike: Sequence[UnitPlacement]) -> None:
        """Descends by the estimate alone from several starts, and by simulations from the best of the results."""
        trials, step_time = self.trials, relaxed.step_time
        rounded = [Mix.of_relaxation(self.training, one) for one in (relaxed, *self._with_less(relaxed))]
        starts = rounded + [Mix.of_alike(self.training, one, step_time) for one in alike]
        if trials.best is not None:
            starts.append(Mix.of_units(self.training, trials.best.placement.units, step_time))
        estimates = MixEstimate(relaxed.estimate)
        persistent = [
            replace(Mix.of_units(self.training, units, step_time), order=Order.STAYING_FIRST)
            for units in self._persistent(relaxed)
        ]
        found: dict[Mix, tuple[float, float, float]] = {}
        for mix in (*(replace(one, order=order) for one in starts for order in Order), *persistent[:_TRIED]):
            found[mix] = estimates.of(mix)
            for stride in _strides(len(self.training.units)):
                mix = self._best_by_estimate(mix, stride, estimates, found)
        found |= {mix: estimates.of(mix) for mix in persistent}
        best = sorted(found.items(), key=lambda item: item[1])
        tried = [mix for mix, _ in best[:_TRIED]] + persistent
        tried += [replace(one, order=order) for one in rounded for order in Order]
        values = {}
        for mix in dict.fromkeys(tried):
            over, _, least_s = found[mix]
            if over <= _NOTHING_GB and self._may_be_better(least_s):
                values[mix] = min(trials.value_of(mix.placement()), trials.value_of(_at_once(mix.placement())))
        self._change_shape(_ROOMS)
        for mix in sorted(values, key=lambda mix: values[mix])[:_DESCENTS] or [best[0][0]]:
            self._descend_from(mix, relaxed)

    def _with_less(self, relaxed: Relaxation) -> list[Relaxation]:
        """The solutions for a little less memory: their roundings fit, with larger slices of the optimizer's step."""
        found = []
        for share in _LESS:
            budget_bytes = int(share * self.trials.budget_bytes)
            for one in relaxations(self.training, self.trials.machine, budget_bytes, self.allowed):
                found += [one] if one.step_time is relaxed.step_time and one.parts else []
        return found

    def _persistent(self, relaxed: Relaxation) -> list[tuple[UnitPlacement, ...]]:
        """Placements in which the first units stay, as published systems place them: for each place of the step and
        each number of units that stay, those with the best estimates, the best of all first."""
        fates = [
            one
            for again in (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST)
            for one in alternating_fates(self.training, Activations.OFFLOAD, again)
        ]
        chosen: list[tuple[tuple[float, float, float], tuple[UnitPlacement, ...]]] = []
        for state in (State.HOST, State.CPU) if self.allowed.cpu_steps else (State.HOST,):
            homes = persistent_homes(self.training, state)
            by_home: dict[int, list[tuple[tuple[float, float, float], int]]] = {}
            for rank, home, fate in relaxed.estimate.of_products(homes, fates):
                by_home.setdefault(home, []).append((rank, fate))
            for home, found in by_home.items():
                for rank, fate in sorted(found)[:_TRIED_OF_EACH]:
                    chosen.append((rank, with_fates(homes[home], fates[fate])))
        return [units for _, units in sorted(chosen, key=lambda one: one[0])]

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
        """Takes the first better neighbour, until none is better."""
        best = self.trials.best
        shape = {} if best is None else {name: getattr(best.placement, name) for name in _SEARCHED_SHAPE}
        value = self.trials.value_of(replace(mix.placement(), **shape))
        for stride in _strides(len(self.training.units)):
            changed = True
            while changed and not self._is_over():
                changed = False
                for other in mix.neighbours(self.allowed, stride):
                    placement = replace(other.placement(), **shape)
                    if relaxed is not None:
                        over, least_s = relaxed.estimate.of(placement.units)
                        if over > _NOTHING_GB or not self._may_be_better(least_s):
                            continue
                    found = self.trials.value_of(placement)
                    if found < value:
                        mix, value, changed = other, found, True
                        break
                    if self._is_over():
                        break

    def _change_shape(self, shapes: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Tries other slices of the optimizer's step and other times for copies to the host."""
        for ones in shapes:
            for shape in ones:
                if self.trials.best is not None and not self._is_best(self._bound_s * 1e9):
                    self.trials.value_of(replace(self.trials.best.placement, **shape))

    def _change_units(self, together: int) -> None:
        """Without groups: tries all placements of this many units together, if the remaining work suffices."""
        trials = self.trials
        choices = [unit_choices(self.training, index, self.allowed) for index in range(len(self.training.units))]
        chosen = list(itertools.combinations(range(len(choices)), together))
        if sum(math.prod(len(choices[index]) for index in indices) for indices in chosen) > trials.work:
            return
        changes = [
            list(zip(indices, ones, strict=True))
            for indices in chosen
            for ones in itertools.product(*(choices[index] for index in indices))
        ]
        improved = True
        while improved and trials.best is not None:
            improved = False
            for change in changes:
                if self._is_over():
                    return
                best, units = trials.best, trials.best.placement.units
                for index, one in change:
                    units = with_unit(units, index, one)
                trials.value_of(replace(best.placement, units=units))
                improved = improved or trials.best is not best


def _at_once(placement: Placement) -> Placement:
    """The same with copies to the host that give back their memory at once."""
    return replace(placement, room_share_of_steps=0.0, room_share_of_passes=0.0)


def _strides(count: int) -> Iterator[int]:
    stride = max(1, count // 2)
    while stride:
        yield stride
        stride //= 2
