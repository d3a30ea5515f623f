"""autoswap: offloads the storages with the best score at the peak, by one of four scores (Zhang et al., 2019).

Candidates are the gaps across the peak. They are picked, the best first, until the peak is under the budget. Copies to
the host are issued one by one as they are ready. Reloads are scheduled one by one from the last needed to the first,
each to be complete when it is needed or when the next begins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import accumulate

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.policies.swap_schedule import release_when_copied, reload_within_room
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.peak_picking import Ranking, free_ns, pick_at_peak
from vdnn.step.plan import Plan, make_plan


class Score(Enum):
    """The four scores of AutoSwap."""

    DOA = "doa"  # duration of absence: how long the storage is absent, less the time of its copies
    AOA = "aoa"  # area of absence: DOA times the bytes, or DOA divided by the bytes if it is negative
    WDOA = "wdoa"  # weighted: bytes over the budget, summed over the points of the absence; below it they are negative
    SWDOA = "swdoa"  # submodular: WDOA, computed again after every pick


class AutoSwap(PlanPolicy):
    """Without a budget nothing is offloaded. With `sticks_to_limit`, the paper's "stick to limit", the step waits for
    copies to the host and reloads are issued later where the schedule would be over the budget. Without it, the paper's
    other way, nothing waits, and the plan may be over the budget.

    Differences from the paper: its memory pool (SmartPool), its voting among scores, and its search for the period of a
    step are left out; a recording is one step. The second gap of a storage counts no copy to the host, because the host
    copy still exists.
    """

    def __init__(self, score: Score, *, sticks_to_limit: bool = True) -> None:
        self._score = score
        self._sticks_to_limit = sticks_to_limit

    @property
    def name(self) -> str:
        return f"autoswap-{self._score.value}"

    @property
    def source(self) -> str:
        return f"AutoSwap (Zhang et al., 2019), by {self._score.name}"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        recording = request.recording
        clock = StepClock(recording, request.costs)
        gaps = gaps_of(recording)
        picked = set(pick_at_peak(recording, gaps, budget_bytes, self._ranking(clock, budget_bytes)))
        chosen = [gap for gap in gaps if gap in picked]
        limit = budget_bytes if self._sticks_to_limit else None
        released = release_when_copied(recording, clock, chosen, limit)
        absences = reload_within_room(recording, released, _scheduled_from_the_end(clock, released), limit)
        return make_plan(recording, self.name, planned_lifetimes(recording, absences), budget_bytes)

    def _ranking(self, clock: StepClock, budget_bytes: int) -> Ranking:
        if self._score is Score.DOA:
            return _by(lambda gap: free_ns(clock, gap))
        if self._score is Score.AOA:
            return _by(lambda gap: area_of_absence(free_ns(clock, gap), gap.nbytes))
        return partial(by_weight, budget_bytes=budget_bytes, is_taken_anew=self._score is Score.SWDOA)


def area_of_absence(duration_ns: int, nbytes: int) -> float:
    return duration_ns * nbytes if duration_ns >= 0 else duration_ns / max(nbytes, 1)


def _by(score: Callable[[Gap], float]) -> Ranking:
    return lambda candidates, _: iter(sorted(candidates, key=lambda gap: -score(gap)))


def by_weight(
    candidates: Sequence[Gap], peaks: Sequence[int], budget_bytes: int, *, is_taken_anew: bool
) -> Iterator[Gap]:
    """Yields candidates by their weight: the bytes over the budget, summed over the gap. With `is_taken_anew`, weights
    are computed again after every pick, which the caller subtracts from `peaks`."""
    # Picks only lower weights, so a candidate whose new weight is the highest in the heap is the best of all.
    sums = _sums_over(peaks, budget_bytes)
    heap = [(-_weight(sums, gap), index, 0) for index, gap in enumerate(candidates)]
    heapq.heapify(heap)
    picked = 0
    while heap:
        _, index, weighed_after = heapq.heappop(heap)
        if is_taken_anew and weighed_after < picked:
            heapq.heappush(heap, (-_weight(sums, candidates[index]), index, picked))
            continue
        yield candidates[index]
        picked += 1
        if is_taken_anew:
            sums = _sums_over(peaks, budget_bytes)


def _sums_over(peaks: Sequence[int], budget_bytes: int) -> list[int]:
    return list(accumulate((peak - budget_bytes for peak in peaks), initial=0))


def _weight(sums: Sequence[int], gap: Gap) -> int:
    return sums[gap.last + 1] - sums[gap.first]


def _scheduled_from_the_end(clock: StepClock, released: dict[Gap, int]) -> dict[Gap, int]:
    """Reload points at which each reload begins in time, if no two run at once."""
    points = {}
    next_ns: int | None = None
    for gap in sorted(released, key=lambda one: (-one.last, -one.lifetime)):
        if gap.use is None:
            continue
        end_ns = clock.reached_ns[gap.use] if next_ns is None else min(clock.reached_ns[gap.use], next_ns)
        next_ns = end_ns - clock.to_device_ns(gap.nbytes)
        points[gap] = clock.last_point_by(next_ns)
    return points
