"""The reference schedule of a choice of gaps: releases as late and reloads as early as a budget allows.

From the first interval on, storages are released only if an interval would not fit, in the order in which their copies
complete, because waiting for one copy waits for all before it. With `furthest_first`, the storage that is used last is
released first. Storages that need not be released are kept. Then, in the order of uses, each storage is reloaded at the
earliest point from which there is room until the use; with `in_order`, not before a storage that is needed earlier,
because reloads run one by one. `more_room` asks for more room than the budget requires in some intervals, so that
reloads can be issued earlier. The native core has the same algorithm; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vdnn.planning.gaps import Gap
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


def schedule(
    recording: Recording,
    gaps: Sequence[Gap],
    may_leave: Sequence[bool],
    budget_bytes: int,
    more_room: Mapping[int, int] | None = None,
    *,
    in_order: bool = False,
    furthest_first: bool = False,
) -> dict[Gap, Absence] | None:
    """Returns the absences of the chosen gaps, or None if they do not fit. `gaps` are in the order of gaps_of()."""
    waiting = [gap for gap, may in zip(gaps, may_leave, strict=True) if may]
    if furthest_first:
        waiting.sort(key=lambda gap: -len(recording.points) if gap.use is None else -gap.use)
    released = _release_late(recording, waiting, budget_bytes, more_room or {})
    if released is None:
        return None
    room = [budget_bytes - point.peak_bytes for point in recording.points]
    for gap, release_point in released.items():
        for interval in range(release_point + 1, gap.last + 1):
            room[interval] += gap.nbytes
    return _reload_early(gaps, released, room, in_order)


def _release_late(
    recording: Recording, waiting: list[Gap], budget_bytes: int, more_room: Mapping[int, int]
) -> dict[Gap, int] | None:
    """Returns the release points, or None if an interval does not fit. `waiting` is in the order of releases."""
    released: dict[Gap, int] = {}
    back_at: dict[int, int] = {}  # bytes, by the first interval in which they are on the device again
    absent = 0
    for interval, point in enumerate(recording.points):
        absent -= back_at.pop(interval, 0)
        missing = point.peak_bytes - budget_bytes
        wanted = missing + more_room.get(interval, 0)
        while absent < wanted:
            gap = next((one for one in waiting if one.first <= interval <= one.last), None)
            if gap is None:
                if absent < missing:
                    return None
                break
            waiting.remove(gap)
            released[gap] = interval - 1
            absent += gap.nbytes
            back_at[gap.last + 1] = back_at.get(gap.last + 1, 0) + gap.nbytes
    return released


def _reload_early(gaps: Sequence[Gap], released: dict[Gap, int], room: list[int], in_order: bool) -> dict[Gap, Absence]:
    places = {gap: place for place, gap in enumerate(gaps)}
    absences: dict[Gap, Absence] = {}
    earliest = -1
    for gap in sorted(released, key=lambda one: (one.last, places[one])):
        release_point = released[gap]
        if gap.use is None:
            absences[gap] = Absence(release_point)
            continue
        first = gap.last + 1  # the interval in which it is on the device again
        until = max(release_point, min(earliest, gap.last)) if in_order else release_point
        while first - 1 > until and room[first - 1] >= gap.nbytes:
            first -= 1
            room[first] -= gap.nbytes
        earliest = first - 1
        if first - 1 == release_point:
            continue  # there is always room for it, so it is kept
        absences[gap] = Absence(release_point, None if first - 1 == gap.use else first - 1)
    return absences
