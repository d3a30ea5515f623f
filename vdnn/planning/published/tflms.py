"""tflms: offloads storages used far from where they are made (Le et al., ISMM 2019; IBM's large model support 2).

Distances are counted in levels, the operations in the order in which the step ran them. A use that is more than
`threshold` levels from where the storage was made reads a reloaded copy; nearer uses find it on the device. Far uses
share one reload if each is within `groupby` levels of the one before. The reload is issued `ahead` levels before its
use. A storage is released one level after it was made, or after its last near use.
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
    """The parameters of TFLMS, given or found. `waits_out`: the step waits for copies to the host and releases storages
    at once. `waits_back`: reloads are issued at the use, which waits for them."""

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
    """With `thresholds` given, nothing is searched for. Otherwise, without a budget nothing is offloaded.

    The search is that of TFLMS: the largest `threshold` under which the step fits the budget, then the largest
    `ahead`, then whether all uses can share a reload, or how many. If no threshold suffices, the step waits for copies
    where they are issued: first for those to the host, then for reloads, then for both.

    Differences from TFLMS: it sorts a graph into levels; here they are in the order in which the step ran. It tries
    with nine tenths of the memory, because its simulator counts levels and not measured bytes; here the whole budget
    counts. Left out are its rule for tensors of one dimension, which a recording does not tell apart, and running the
    operations of one level one after the other.
    """

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
    """The thresholds that the search finds. None if no threshold fits the budget, even with all waits."""

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


def _largest(settings: Sequence[Thresholds], passes: Callable[[Thresholds], bool]) -> Thresholds:
    """The last item that passes, found by bisection, as if all items before it passed. The first item passes."""
    best, low, high = settings[0], 1, len(settings) - 1
    while low <= high:
        middle = (low + high) // 2
        if passes(settings[middle]):
            best, low = settings[middle], middle + 1
        else:
            high = middle - 1
    return best


def _first_met(settings: Sequence[Thresholds], passes: Callable[[Thresholds], bool]) -> Thresholds | None:
    """Tries the item in the middle, then at a quarter and so on, and returns the first that passes, as TFLMS does."""
    high = len(settings)
    while high > 0:
        middle = high // 2
        if passes(settings[middle]):
            return settings[middle]
        high = middle
    return None


class _Levels:
    """The levels of a recording, and the absences that thresholds make."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._level_of: list[int] = []  # by point
        self._first_point: list[int] = []  # by level
        starts = {operation.uses[0] for operation in operations_of(recording)}
        for index, point in enumerate(recording.points):
            runs_on = point.kind is PointKind.USE and index not in starts
            if not self._level_of or index in starts or (point.compute_ns > 0 and not runs_on):
                self._first_point.append(index)
            self._level_of.append(len(self._first_point) - 1)

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
        made = self._level_of[lifetime.copy_point]
        near = [use for use in lifetime.uses if self._level_of[use] - made <= thresholds.threshold]
        far = [use for use in lifetime.uses if self._level_of[use] - made > thresholds.threshold]
        release_point = lifetime.copy_point
        if not thresholds.waits_out:
            next_level = self._first_point[min(made + _SWAPOUT_LEVELS, self.count - 1)]
            release_point = max(release_point, next_level, lifetime.free_point)
        release_point = max([release_point, *near])
        for group in self._groups(far, thresholds.groupby):
            absent = absent_intervals(lifetime, Absence(release_point))
            if release_point < group[0] and absent:
                reload_point = self._first_point[max(self._level_of[group[0]] - thresholds.ahead, 0)]
                reload_point = group[0] if thresholds.waits_back else max(reload_point, absent.start)
                yield Absence(release_point, None if reload_point >= group[0] else reload_point)
            release_point = max(release_point, group[-1])

    def _groups(self, uses: Sequence[int], groupby: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for use in uses:
            if groups and groupby > 0 and self._level_of[use] - self._level_of[groups[-1][-1]] <= groupby:
                groups[-1].append(use)
            else:
                groups.append([use])
        return groups
