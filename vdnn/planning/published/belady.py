"""Belady's rule for a recorded step: where room is needed, what is used last of all leaves.

The best there is where every fetch costs the same and hides nothing; the rule inside SwapAdvisor, and a measure for
others. What left comes back as early as there is room, what is used first first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from vdnn.planning.gaps import Gap
from vdnn.planning.policies.swap_schedule import reload_within_room
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


def belady(
    recording: Recording, gaps: Sequence[Gap], may_leave: Sequence[bool], budget_bytes: int
) -> dict[Gap, Absence] | None:
    """What is away when, of the gaps that may be; None if that does not fit."""
    released = _evicted(recording, gaps, may_leave, budget_bytes)
    return None if released is None else reload_within_room(recording, released, {}, budget_bytes)


def _evicted(
    recording: Recording, gaps: Sequence[Gap], may_leave: Sequence[bool], budget_bytes: int
) -> dict[Gap, int] | None:
    beginning: defaultdict[int, list[Gap]] = defaultdict(list)
    for gap, may in zip(gaps, may_leave, strict=True):
        if may:
            beginning[gap.first].append(gap)
    never = len(recording.points)
    here: list[tuple[int, int, int, Gap]] = []  # a heap: the furthest use first, of several the largest
    released: dict[Gap, int] = {}
    back_at: defaultdict[int, int] = defaultdict(int)
    absent = 0
    for interval, point in enumerate(recording.points):
        absent -= back_at[interval]
        for gap in beginning[interval]:
            furthest = never if gap.use is None else gap.use
            heapq.heappush(here, (-furthest, -gap.nbytes, gap.lifetime, gap))
        while point.peak_bytes - absent > budget_bytes:
            while here and here[0][3].last < interval:
                heapq.heappop(here)
            if not here:
                return None
            gap = heapq.heappop(here)[3]
            released[gap] = interval - 1
            absent += gap.nbytes
            back_at[gap.last + 1] += gap.nbytes
    return released
