"""autoswap: what leaves is picked by how long and how much it helps at the peak (Zhang et al., 2019, "AutoSwap").

Four scores. DOA: how long it is away, copies taken off. AOA: that times its bytes, or divided by them if negative.
WDOA: the bytes by which the step is over the budget, summed over the points at which it is away; what is under the
budget counts too, as negative. SWDOA: WDOA, taken anew after every pick.

Candidates are those across the peak, picked until the peak is under the budget. Copies out are made one by one as they
are ready; copies back are laid one by one from the last needed to the first, each to be done when it is needed or when
the next begins. Where that would be over the budget, what leaves is waited for and what comes back comes later ("stick
to limit"); the paper's other way, without any waiting, may be over it.

Left out: its pool of memory (SmartPool), its voting among scores, and finding the period of a step, which a recording
has. A second gap of a storage counts no copy out: here the host copy is still there.
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
from vdnn.planning.published.free_time import free_ns
from vdnn.planning.published.peak_picking import Ranking, pick_at_peak
from vdnn.step.plan import Plan, make_plan


class Score(Enum):
    """What AutoSwap ranks by."""

    DOA = "doa"  # duration of absence
    AOA = "aoa"  # area of absence
    WDOA = "wdoa"  # weighted duration of absence
    SWDOA = "swdoa"  # the same, submodular


class AutoSwap(PlanPolicy):
    """Of no budget: nothing leaves."""

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
        absences = reload_within_room(recording, released, _laid_from_the_end(clock, released), limit)
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
    """By the bytes over the budget, summed over the gap; anew after each that was taken off `peaks`, or not."""
    # A weight only falls as others are taken, so the best of those that were weighed anew is the best of all.
    sums = _sums_over(peaks, budget_bytes)
    heap = [(-_weight(sums, gap), place, 0) for place, gap in enumerate(candidates)]
    heapq.heapify(heap)
    taken = 0
    while heap:
        _, place, weighed_at = heapq.heappop(heap)
        if is_taken_anew and weighed_at < taken:
            heapq.heappush(heap, (-_weight(sums, candidates[place]), place, taken))
            continue
        yield candidates[place]
        taken += 1
        if is_taken_anew:
            sums = _sums_over(peaks, budget_bytes)


def _sums_over(peaks: Sequence[int], budget_bytes: int) -> list[int]:
    return list(accumulate((peak - budget_bytes for peak in peaks), initial=0))


def _weight(sums: Sequence[int], gap: Gap) -> int:
    return sums[gap.last + 1] - sums[gap.first]


def _laid_from_the_end(clock: StepClock, released: dict[Gap, int]) -> dict[Gap, int]:
    """Reload points at which each copy back begins in time, when no two run at once."""
    points = {}
    next_ns: int | None = None
    for gap in sorted(released, key=lambda one: (-one.last, -one.lifetime)):
        if gap.use is None:
            continue
        done_ns = clock.reached_ns[gap.use] if next_ns is None else min(clock.reached_ns[gap.use], next_ns)
        next_ns = done_ns - clock.to_device_ns(gap.nbytes)
        points[gap] = clock.last_point_by(next_ns)
    return points
