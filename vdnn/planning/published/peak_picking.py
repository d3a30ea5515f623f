"""Picking what leaves by a score, at the peak: the selection that AutoSwap and Capuchin share.

Candidates are the gaps that lie across the peak. The best ones are taken until the peak is under the budget. Both
papers know one peak; where another point is then over the budget, the same is done there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vdnn.planning.gaps import Gap
from vdnn.step.recording import Recording

# Gives candidates, best first. The bytes of every interval change while it does: by what was taken of it.
Ranking = Callable[[Sequence[Gap], Sequence[int]], Iterator[Gap]]


def pick_at_peak(recording: Recording, gaps: Sequence[Gap], budget_bytes: int, ranking: Ranking) -> list[Gap]:
    """In the order in which they were picked. If they do not suffice there are no more that would help."""
    peaks = [point.peak_bytes for point in recording.points]
    picked: dict[Gap, None] = {}
    while max(peaks) > budget_bytes:
        interval = peaks.index(max(peaks))
        candidates = [gap for gap in gaps if gap.first <= interval <= gap.last and gap not in picked]
        if not candidates:
            break
        for gap in ranking(candidates, peaks):
            picked[gap] = None
            for away in range(gap.first, gap.last + 1):
                peaks[away] -= gap.nbytes
            if peaks[interval] <= budget_bytes:
                break
    return list(picked)
