"""Plan under a byte budget: offload what was saved first, keep what was saved last, as SSDTrain cuts a step in two.

What is saved last is used first: it would hardly have gone before it must be back. So storages are kept from the end
of the forward pass backwards as long as the budget holds at every point; the rest goes. Within what the budget
leaves, each is given up late (the copy has more time before anybody waits for it) and asked back early, the first
needed first.
"""

from __future__ import annotations

from collections.abc import Iterable

from vdnn.planning.footprint import absent_intervals, interval_bytes, offload_everything, use_after
from vdnn.planning.least_memory import require_feasible
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Lifetime, Recording


class PrefixCut(PlanPolicy):
    """Of no budget: nothing leaves."""

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
    """A plan whose peak is at most `budget_bytes`. BudgetError if even offloading everything does not get there."""
    everything = offload_everything(recording)
    peaks = interval_bytes(recording, everything)
    require_feasible(recording, peaks, budget_bytes)
    room = [budget_bytes - peak for peak in peaks]
    away = [list(planned.absences) for planned in everything]
    for lifetime, absences in reversed(list(zip(recording.lifetimes, away, strict=True))):
        _stay_if_it_fits(lifetime, absences, room)
    offloaded = [(lifetime, absences) for lifetime, absences in zip(recording.lifetimes, away, strict=True) if absences]
    for lifetime, absences in sorted(offloaded, key=lambda one: use_after(one[0], one[1][0].release_point) or 0):
        for place, absence in enumerate(absences):
            absences[place] = _back_early(lifetime, absence, room)
    for lifetime, absences in offloaded:
        for place, absence in enumerate(absences):
            absences[place] = _gone_late(lifetime, absence, room)
    planned = (
        PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if absences else Action.KEEP, tuple(absences))
        for lifetime, absences in zip(recording.lifetimes, away, strict=True)
    )
    return make_plan(recording, "prefix-cut", tuple(planned), budget_bytes)


def _stay_if_it_fits(lifetime: Lifetime, absences: list[Absence], room: list[int]) -> None:
    """For the whole step, else from one use to the next."""
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


def _back_early(lifetime: Lifetime, absence: Absence, room: list[int]) -> Absence:
    """The earliest point from which the room holds up to the use."""
    use = use_after(lifetime, absence.release_point)
    if use is None:
        return absence
    away = absent_intervals(lifetime, absence)
    point = use
    while point - 1 >= away.start and room[point] >= lifetime.nbytes:
        point -= 1
    if point == use:
        return absence
    _take(room, range(point + 1, use + 1), lifetime.nbytes)
    return Absence(absence.release_point, point)


def _gone_late(lifetime: Lifetime, absence: Absence, room: list[int]) -> Absence:
    """The latest point up to which the room holds; before the copy back, and never past a use."""
    away = absent_intervals(lifetime, absence)
    release_point = away.start - 1  # till then it is there anyway
    while release_point + 2 < away.stop and room[release_point + 1] >= lifetime.nbytes:
        release_point += 1
        room[release_point] -= lifetime.nbytes
    return Absence(release_point, absence.reload_point)


def _take(room: list[int], intervals: Iterable[int], nbytes: int) -> None:
    for interval in intervals:
        room[interval] -= nbytes
