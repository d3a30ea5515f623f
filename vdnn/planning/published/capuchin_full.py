"""capuchin-full: offloads what computing hides; offloads or recomputes the rest (Peng et al., ASPLOS 2020).

At the peak, storages with the most free time are offloaded first, as long as their copies are hidden: all copies to the
host, one by one, are complete before the peak, and all reloads, one by one, can begin after it and be in time. The rest
is chosen by memory saved per second of recomputing (MSPS), the most first. A storage is recomputed if that takes less
time than its copies, which are no longer hidden, and offloaded otherwise. Offloading is then planned as `capuchin`
plans it, on the step with its recomputes, with in-triggers and feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.errors import BudgetError
from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.capuchin import Capuchin
from vdnn.planning.published.peak_picking import free_ns
from vdnn.planning.published.recomputed_steps import RecomputedSteps
from vdnn.planning.recomputing import with_recomputes
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime
from vdnn.step.recording import Recording


class CapuchinFull(PlanPolicy):
    """Without a budget nothing is offloaded or recomputed. `feedback_steps` is larger than that of `capuchin`, because
    the paper continues until no reload is late.

    Differences from the paper: a storage that was recomputed for another recompute is discarded again if memory is
    short, and its recomputes count each time. Here a storage is recomputed once and stays. If the choice does not fit
    for that reason, the later half of it is offloaded instead, and so on. The comparison of a recompute with copies,
    and the updates for chains, are from memory of the paper.
    """

    def __init__(self, *, feedback_steps: int = 400) -> None:
        self._swapping = Capuchin(feedback_steps=feedback_steps)

    @property
    def name(self) -> str:
        return "capuchin-full"

    @property
    def source(self) -> str:
        return "Capuchin (Peng et al., ASPLOS 2020), its swapping and recomputing"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        chosen = to_recompute(request, budget_bytes)
        while chosen:
            try:
                return self._with_recomputes(request, chosen)
            except BudgetError:
                chosen = chosen[: len(chosen) // 2]
        return self._with_recomputes(request, chosen)

    def _with_recomputes(self, request: PlanRequest, chosen: Sequence[int]) -> Plan:
        followed = request._replace(recording=with_recomputes(request.recording, chosen))
        plan = self._swapping.plan(followed)
        lifetimes = tuple(
            PlannedLifetime(one.nbytes, Action.RECOMPUTE) if index in chosen else one
            for index, one in enumerate(plan.lifetimes)
        )
        return Plan(self.name, plan.backend, plan.device_name, plan.budget_bytes, plan.points, lifetimes)


def to_recompute(request: PlanRequest, budget_bytes: int) -> list[int]:
    """The storages to recompute at the peak, in the order of the choice. Other points over the budget are left to
    offloading."""
    recording = request.recording
    peaks = [point.peak_bytes for point in recording.points]
    interval = peaks.index(max(peaks))
    clock = StepClock(recording, request.costs)
    gaps = [gap for gap in gaps_of(recording) if gap.first <= interval <= gap.last]
    hidden = _hidden_swaps(clock, gaps, interval, peaks[interval] - budget_bytes)
    missing_bytes = peaks[interval] - budget_bytes - sum(gap.nbytes for gap in hidden)
    return _by_saving_per_second(recording, clock, gaps, interval, {gap.lifetime for gap in hidden}, missing_bytes)


def _hidden_swaps(clock: StepClock, gaps: Sequence[Gap], interval: int, enough_bytes: int) -> list[Gap]:
    hidden: list[Gap] = []
    for gap in sorted(gaps, key=lambda one: -free_ns(clock, one)):
        if sum(one.nbytes for one in hidden) >= enough_bytes:
            break
        if _are_hidden(clock, [*hidden, gap], interval):
            hidden.append(gap)
    return hidden


def _are_hidden(clock: StepClock, gaps: Sequence[Gap], interval: int) -> bool:
    """True if no copy of these gaps makes the step wait: all are absent in the interval and reloaded in time."""
    copied_ns = 0
    for gap in sorted(gaps, key=lambda one: one.release_point):
        copy_ns = clock.to_host_ns(gap.nbytes) if gap.number == 0 else 0
        copied_ns = max(copied_ns, clock.reached_ns[gap.release_point]) + copy_ns
    if copied_ns > clock.reached_ns[interval - 1]:
        return False
    reload_ns = clock.reached_ns[-1]
    for gap in sorted(gaps, key=lambda one: -one.last):
        if gap.use is not None:
            reload_ns = min(reload_ns, clock.reached_ns[gap.use]) - clock.to_device_ns(gap.nbytes)
    return reload_ns >= clock.reached_ns[interval]


def _by_saving_per_second(
    recording: Recording, clock: StepClock, gaps: Sequence[Gap], interval: int, swapped: set[int], missing_bytes: int
) -> list[int]:
    """Storages to recompute until `missing_bytes` are saved. After every choice, the cost of all others is updated."""
    lifetimes = recording.lifetimes
    copies_ns = {gap.lifetime: clock.to_host_ns(gap.nbytes) + clock.to_device_ns(gap.nbytes) for gap in gaps}
    recomputes = RecomputedSteps(recording).recomputes
    candidates = {
        one
        for one, recompute in recomputes.items()
        if one not in swapped and interval in absent_intervals(lifetimes[one], Absence(recompute.known_point))
    }
    chosen_ns: dict[int, int] = {}  # by chosen storage: the time of its recompute and of those it needs

    def recompute_ns(index: int) -> int:
        recompute = recomputes[index]
        return recompute.compute_ns + sum(chosen_ns.get(source, 0) for source in recompute.inputs)

    while missing_bytes > 0 and candidates:
        index = max(candidates, key=lambda one: (lifetimes[one].nbytes / max(recompute_ns(one), 1), -one))
        candidates.discard(index)
        missing_bytes -= lifetimes[index].nbytes
        if index not in copies_ns or recompute_ns(index) <= copies_ns[index]:
            chosen_ns[index] = recompute_ns(index)
    return list(chosen_ns)
