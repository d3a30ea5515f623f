"""prefix-cut: offloads the first saves and keeps the last ones (SSDTrain's cut of a step in two).

The last saves are used first, so offloading them hardly frees memory before they have to be reloaded. Storages are kept
from the end of the forward pass backwards, as long as every point stays under the budget; the others are offloaded.
Within the budget, each is released late, so that its copy has more time, and reloaded early, the first needed first.
"""

from __future__ import annotations

from collections.abc import Iterable

from vdnn.planning.footprint import absent_intervals, interval_bytes, offload_everything, use_after
from vdnn.planning.least_memory import require_feasible
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Lifetime, Recording


class PrefixCut(PlanPolicy):
    """Without a budget nothing is offloaded."""

    @property
    def name(self) -> str:
        return "prefix-cut"

    @property
    def source(self) -> str:
        return "SSDTrain (Wu et al., 2024), its cut of a step in two"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = request.recording.peak_bytes if request.budget_bytes is None else request.budget_bytes
        return prefix_cut(request.recording, budget_bytes)


def prefix_cut(recording: Recording, budget_bytes: int) -> Plan:
    """A plan whose peak is at most `budget_bytes`. Raises BudgetError if offloading everything is not enough."""
    everything = offload_everything(recording)
    peaks = interval_bytes(recording, everything)
    require_feasible(recording, peaks, budget_bytes)
    room = [budget_bytes - peak for peak in peaks]
    absences_of = [list(planned.absences) for planned in everything]
    every = list(zip(recording.lifetimes, absences_of, strict=True))
    for lifetime, absences in reversed(every):
        _keep_if_it_fits(lifetime, absences, room)
    offloaded = [(lifetime, absences) for lifetime, absences in every if absences]
    for lifetime, absences in sorted(offloaded, key=lambda one: use_after(one[0], one[1][0].release_point) or 0):
        for index, absence in enumerate(absences):
            absences[index] = _reloaded_early(lifetime, absence, room)
    for lifetime, absences in offloaded:
        for index, absence in enumerate(absences):
            absences[index] = _released_late(lifetime, absence, room)
    planned = (
        PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if absences else Action.KEEP, tuple(absences))
        for lifetime, absences in every
    )
    return make_plan(recording, "prefix-cut", tuple(planned), budget_bytes)


def _keep_if_it_fits(lifetime: Lifetime, absences: list[Absence], room: list[int]) -> None:
    """Removes all absences if the storage fits for the whole step, or else those between uses in which it fits."""
    intervals = [interval for absence in absences for interval in absent_intervals(lifetime, absence)]
    if all(room[interval] >= lifetime.nbytes for interval in intervals):
        _take(room, intervals, lifetime.nbytes)
        absences.clear()
        return
    for absence in absences[:0:-1]:
        between = absent_intervals(lifetime, absence)
        if all(room[interval] >= lifetime.nbytes for interval in between):
            _take(room, between, lifetime.nbytes)
            absences.remove(absence)


def _reloaded_early(lifetime: Lifetime, absence: Absence, room: list[int]) -> Absence:
    """The absence with the earliest reload point from which there is room up to the use."""
    use = use_after(lifetime, absence.release_point)
    if use is None:
        return absence
    absent = absent_intervals(lifetime, absence)
    point = use
    while point - 1 >= absent.start and room[point] >= lifetime.nbytes:
        point -= 1
    if point == use:
        return absence
    _take(room, range(point + 1, use + 1), lifetime.nbytes)
    return Absence(absence.release_point, point)


def _released_late(lifetime: Lifetime, absence: Absence, room: list[int]) -> Absence:
    """The absence with the latest release point up to which there is room, before its reload and its next use."""
    absent = absent_intervals(lifetime, absence)
    release_point = absent.start - 1  # up to there it is on the device anyway
    while release_point + 2 < absent.stop and room[release_point + 1] >= lifetime.nbytes:
        release_point += 1
        room[release_point] -= lifetime.nbytes
    return Absence(release_point, absence.reload_point)


def _take(room: list[int], intervals: Iterable[int], nbytes: int) -> None:
    for interval in intervals:
        room[interval] -= nbytes
