"""tflms: what is used far from where it was made leaves (TFLMS, Le et al., ISMM 2019; IBM's large model support 2).

Distances are counted in levels: operations in the order in which the step ran them, where TFLMS sorts a graph. A use
further than `threshold` levels from where a storage was made is served from the host, the nearer ones from the device.
Far uses of which each is within `groupby` levels of the one before share one copy back. It is issued `ahead` levels
before the use. A storage is given up one level after it was made, or after its last near use.

The numbers are found by trying, as theirs are: the largest threshold under which the step stays under the budget, then
the largest `ahead`, then whether all uses can share a copy or how many. If no threshold will do, copies are waited for
where they are issued: first those out, then those back, then both. TFLMS tries with nine tenths of the memory, because
its simulator counts levels and not bytes that a step was seen to take; here all of the budget counts.

Left out: tensors of one dimension, which a recording does not tell apart, and running operations of one level in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.policies.backward_operations import operations_of
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import (
    Lifetimes,
    budget_to_meet,
    first_that_fits,
    keep_everything,
    peak_bytes,
)
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Lifetime, PointKind, Recording

_SWAPOUT_LEVELS = 1


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What TFLMS is told, or finds. Waiting for copies out gives a storage up at once; waiting for those back issues
    them when they are used."""

    threshold: int = 1
    ahead: int = 1
    groupby: int = 0
    waits_out: bool = False
    waits_back: bool = False


_MODES = (
    Thresholds(),
    Thresholds(waits_out=True),
    Thresholds(waits_back=True),
    Thresholds(waits_out=True, waits_back=True),
)


class Tflms(PlanPolicy):
    """With `thresholds` nothing is searched for. Of no budget: nothing leaves."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds

    @property
    def name(self) -> str:
        return "tflms"

    @property
    def source(self) -> str:
        return "TFLMS (Le et al., ISMM 2019), as in IBM's large model support 2"

    def plan(self, request: PlanRequest) -> Plan:
        recording = request.recording
        levels = _Levels(recording)
        if self._thresholds is not None:
            return make_plan(recording, self.name, levels.lifetimes(self._thresholds), request.budget_bytes)
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        found = _tuned(levels, budget_bytes)
        candidates = _MODES if found is None else (found,)
        lifetimes = first_that_fits(recording, (levels.lifetimes(one) for one in candidates), budget_bytes)
        return make_plan(recording, self.name, lifetimes, budget_bytes)


def _tuned(levels: _Levels, budget_bytes: int) -> Thresholds | None:
    """None if no threshold will do, however much is waited for."""

    def passes(thresholds: Thresholds) -> bool:
        return peak_bytes(levels.recording, levels.lifetimes(thresholds)) <= budget_bytes

    found = next((mode for mode in _MODES if passes(mode)), None)
    if found is None:
        return None
    found = _largest([replace(found, threshold=number) for number in range(1, levels.count + 1)], passes)
    if found.waits_back:
        return found
    found = _largest([replace(found, ahead=number) for number in range(1, levels.count + 1)], passes)
    shared = replace(found, groupby=levels.count)
    if passes(shared):
        return shared
    return _first_met([replace(found, groupby=number) for number in range(1, levels.count)], passes) or found


def _largest(ladder: Sequence[Thresholds], passes: Callable[[Thresholds], bool]) -> Thresholds:
    """By halving, as if all before one that passes did. The first does."""
    best, low, high = ladder[0], 1, len(ladder) - 1
    while low <= high:
        middle = (low + high) // 2
        if passes(ladder[middle]):
            best, low = ladder[middle], middle + 1
        else:
            high = middle - 1
    return best


def _first_met(ladder: Sequence[Thresholds], passes: Callable[[Thresholds], bool]) -> Thresholds | None:
    """By halving down to the first that passes: TFLMS is content with it."""
    high = len(ladder)
    while high > 0:
        middle = high // 2
        if passes(ladder[middle]):
            return ladder[middle]
        high = middle
    return None


class _Levels:
    """A recording seen by its levels."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._of_point: list[int] = []
        self._first_point: list[int] = []  # of a level
        starts = {operation.uses[0] for operation in operations_of(recording)}
        for index, point in enumerate(recording.points):
            runs_on = point.kind is PointKind.USE and index not in starts
            if not self._of_point or index in starts or (point.compute_ns > 0 and not runs_on):
                self._first_point.append(index)
            self._of_point.append(len(self._first_point) - 1)

    @property
    def count(self) -> int:
        return len(self._first_point)

    def lifetimes(self, thresholds: Thresholds) -> Lifetimes:
        planned = []
        for lifetime in self.recording.lifetimes:
            absences = tuple(self._absences(lifetime, thresholds))
            action = Action.OFFLOAD if absences else Action.KEEP
            planned.append(PlannedLifetime(lifetime.nbytes, action, absences))
        return tuple(planned)

    def _absences(self, lifetime: Lifetime, thresholds: Thresholds) -> Iterator[Absence]:
        made = self._of_point[lifetime.copy_point]
        near = [use for use in lifetime.uses if self._of_point[use] - made <= thresholds.threshold]
        far = [use for use in lifetime.uses if self._of_point[use] - made > thresholds.threshold]
        release_point = lifetime.copy_point
        if not thresholds.waits_out:
            out = self._first_point[min(made + _SWAPOUT_LEVELS, self.count - 1)]
            release_point = max(release_point, out, lifetime.free_point)
        release_point = max([release_point, *near])
        for group in self._groups(far, thresholds.groupby):
            away = absent_intervals(lifetime, Absence(release_point))
            if release_point < group[0] and away:
                back = self._first_point[max(self._of_point[group[0]] - thresholds.ahead, 0)]
                back = group[0] if thresholds.waits_back else max(back, away.start)
                yield Absence(release_point, None if back >= group[0] else back)
            release_point = max(release_point, group[-1])

    def _groups(self, uses: Sequence[int], groupby: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for use in uses:
            if groups and groupby > 0 and self._of_point[use] - self._of_point[groups[-1][-1]] <= groupby:
                groups[-1].append(use)
            else:
                groups.append([use])
        return groups
