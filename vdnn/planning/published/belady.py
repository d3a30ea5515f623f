"""Belady's rule for a recorded step: when room is needed, the storage whose next use is furthest away is offloaded.

The rule is optimal if every reload costs the same and none is hidden. SwapAdvisor uses it inside its search. Storages
are reloaded as early as there is room, the next used first.
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
    """The absences that the rule chooses among the gaps that `may_leave` allows. None if they do not fit the budget."""
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
    on_device: list[tuple[int, int, int, Gap]] = []  # a heap: the furthest use first; for equal uses the largest
    released: dict[Gap, int] = {}
    reloaded_at: defaultdict[int, int] = defaultdict(int)
    absent = 0
    for interval, point in enumerate(recording.points):
        absent -= reloaded_at[interval]
        for gap in beginning[interval]:
            furthest = never if gap.use is None else gap.use
            heapq.heappush(on_device, (-furthest, -gap.nbytes, gap.lifetime, gap))
        while point.peak_bytes - absent > budget_bytes:
            while on_device and on_device[0][3].last < interval:
                heapq.heappop(on_device)
            if not on_device:
                return None
            gap = heapq.heappop(on_device)[3]
            released[gap] = interval - 1
            absent += gap.nbytes
            reloaded_at[gap.last + 1] += gap.nbytes
    return released
