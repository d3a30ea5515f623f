"""capuchin-full: what hides behind computing is swapped, the rest is swapped or recomputed (Peng et al., ASPLOS 2020).

At the peak, what has the most free time is swapped first, as long as that is hidden: all copies out, one by one, are
done before the peak, and all copies back, one by one, can begin behind it and be in time. What is then still too much
goes by memory saved per second of rebuilding (MSPS), the most first, if its rebuild takes less than its copies, which
nothing hides any more; else it is swapped. A rebuild takes longer by those of what it is made from and that has been
chosen already: after every choice all are weighed anew. Swapping itself is then done as `capuchin` does it, on the step
with its rebuilds, with in-triggers and feedback.

The paper lets what is rebuilt on the way go again where memory is short, and counts it as often as it is needed; here
it is rebuilt once and stays. Where the choice does not fit for that reason, the later half of it is swapped instead,
and so on. The comparison and the updates for chains are from memory of the paper.
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
from vdnn.planning.published.free_time import free_ns
from vdnn.planning.published.recomputed_steps import RebuiltSteps
from vdnn.planning.recomputing import with_rebuilds
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime
from vdnn.step.recording import Recording


class CapuchinFull(PlanPolicy):
    """`feedback_steps` are more than `capuchin` has: the paper goes on until nothing is late. Of no budget: nothing
    leaves."""

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
                return self._with_rebuilds(request, chosen)
            except BudgetError:
                chosen = chosen[: len(chosen) // 2]
        return self._with_rebuilds(request, chosen)

    def _with_rebuilds(self, request: PlanRequest, chosen: Sequence[int]) -> Plan:
        followed = request._replace(recording=with_rebuilds(request.recording, chosen))
        plan = self._swapping.plan(followed)
        lifetimes = tuple(
            PlannedLifetime(one.nbytes, Action.RECOMPUTE) if index in chosen else one
            for index, one in enumerate(plan.lifetimes)
        )
        return Plan(self.name, plan.backend, plan.device_name, plan.budget_bytes, plan.points, lifetimes)


def to_recompute(request: PlanRequest, budget_bytes: int) -> list[int]:
    """At the peak, in the order of the choice. What is then still over the budget elsewhere is for swapping."""
    recording = request.recording
    peaks = [point.peak_bytes for point in recording.points]
    interval = peaks.index(max(peaks))
    clock = StepClock(recording, request.costs)
    gaps = [gap for gap in gaps_of(recording) if gap.first <= interval <= gap.last]
    hidden = _hidden_swaps(clock, gaps, interval, peaks[interval] - budget_bytes)
    too_much = peaks[interval] - budget_bytes - sum(gap.nbytes for gap in hidden)
    return _by_saving_per_second(recording, clock, gaps, interval, {gap.lifetime for gap in hidden}, too_much)


def _hidden_swaps(clock: StepClock, gaps: Sequence[Gap], interval: int, enough_bytes: int) -> list[Gap]:
    hidden: list[Gap] = []
    for gap in sorted(gaps, key=lambda one: -free_ns(clock, one)):
        if sum(one.nbytes for one in hidden) >= enough_bytes:
            break
        if _are_hidden(clock, [*hidden, gap], interval):
            hidden.append(gap)
    return hidden


def _are_hidden(clock: StepClock, gaps: Sequence[Gap], interval: int) -> bool:
    """Nobody waits for them: they are away in the interval, and back in time."""
    gone_ns = 0
    for gap in sorted(gaps, key=lambda one: one.release_point):
        out_ns = clock.to_host_ns(gap.nbytes) if gap.number == 0 else 0
        gone_ns = max(gone_ns, clock.reached_ns[gap.release_point]) + out_ns
    if gone_ns > clock.reached_ns[interval - 1]:
        return False
    back_ns = clock.reached_ns[-1]
    for gap in sorted(gaps, key=lambda one: -one.last):
        if gap.use is not None:
            back_ns = min(back_ns, clock.reached_ns[gap.use]) - clock.to_device_ns(gap.nbytes)
    return back_ns >= clock.reached_ns[interval]


def _by_saving_per_second(
    recording: Recording, clock: StepClock, gaps: Sequence[Gap], interval: int, swapped: set[int], too_much: int
) -> list[int]:
    """What is recomputed of what is too much."""
    lifetimes = recording.lifetimes
    copies_ns = {gap.lifetime: clock.to_host_ns(gap.nbytes) + clock.to_device_ns(gap.nbytes) for gap in gaps}
    candidates = set(RebuiltSteps(recording).candidates) - swapped
    candidates = {one for one in candidates if _is_away(recording, one, interval)}
    brought_ns: dict[int, int] = {}  # of what is chosen: what its rebuild takes with all it brings with it

    def rebuild_ns(index: int) -> int:
        rebuild = lifetimes[index].rebuild
        assert rebuild is not None, "a candidate"
        return rebuild.compute_ns + sum(brought_ns.get(source, 0) for source in rebuild.inputs)

    while too_much > 0 and candidates:
        index = max(candidates, key=lambda one: (lifetimes[one].nbytes / max(rebuild_ns(one), 1), -one))
        candidates.discard(index)
        too_much -= lifetimes[index].nbytes
        if index not in copies_ns or rebuild_ns(index) <= copies_ns[index]:
            brought_ns[index] = rebuild_ns(index)
    return list(brought_ns)


def _is_away(recording: Recording, index: int, interval: int) -> bool:
    lifetime = recording.lifetimes[index]
    return lifetime.rebuild is not None and interval in absent_intervals(
        lifetime, Absence(lifetime.rebuild.known_point)
    )
