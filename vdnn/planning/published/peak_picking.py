"""Picks gaps at the peak by a score: the selection that AutoSwap and Capuchin share.

Candidates are the gaps across the peak. The best ones are picked until the peak is under the budget. Both papers have
one peak only; if another point is still over the budget, the selection is repeated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vdnn.planning.gaps import Gap
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
