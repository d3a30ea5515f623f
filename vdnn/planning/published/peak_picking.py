"""Picks gaps at the peak by a score, and the score that AutoSwap and Capuchin share: the free time of a gap.

Candidates are the gaps across the peak. The best ones are picked until the peak is under the budget. Both papers have
one peak only; if another point is still over the budget, the selection is repeated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vdnn.planning.gaps import Gap
from vdnn.planning.policies.step_clock import StepClock
from vdnn.step.recording import Recording

# Yields candidates, the best first. The bytes of every interval, its second argument, change as candidates are picked.
Ranking = Callable[[Sequence[Gap], Sequence[int]], Iterator[Gap]]


def pick_at_peak(recording: Recording, gaps: Sequence[Gap], budget_bytes: int, ranking: Ranking) -> list[Gap]:
    """The picked gaps, in order. If they do not suffice, no other gap would lower the peak."""
    peaks = [point.peak_bytes for point in recording.points]
    picked: dict[Gap, None] = {}
    while max(peaks) > budget_bytes:
        interval = peaks.index(max(peaks))
        candidates = [gap for gap in gaps if gap.first <= interval <= gap.last and gap not in picked]
        if not candidates:
            break
        for gap in ranking(candidates, peaks):
            picked[gap] = None
            for absent in range(gap.first, gap.last + 1):
                peaks[absent] -= gap.nbytes
            if peaks[interval] <= budget_bytes:
                break
    return list(picked)


def free_ns(clock: StepClock, gap: Gap) -> int:
    """The time for which the storage can be absent at no cost: from the end of the copy to the host to the latest start
    of the reload, each alone on the link. Negative if there is not enough time for both. AutoSwap calls it the duration
    of absence. Later gaps of a storage need no second copy to the host, and one that is not used again no reload."""
    copy_ns = clock.to_host_ns(gap.nbytes) if gap.number == 0 else 0
    absent_from_ns = max(clock.reached_ns[gap.release_point] + copy_ns, clock.reached_ns[gap.first - 1])
    reload_ns = 0 if gap.use is None else clock.to_device_ns(gap.nbytes)
    return clock.reached_ns[gap.last] - reload_ns - absent_from_ns
