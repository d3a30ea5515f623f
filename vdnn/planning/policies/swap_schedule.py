"""Points for a choice of gaps, as most published schedulers set them: given up when copied, brought back when wanted.

Where memory would not do, what is on its way out is given up earlier and waited for, in the order of the copies, and
what is on its way back comes later: Capuchin and vDNN++ get there because an allocation blocks, AutoSwap by its rule to
stick to the limit. Without a budget nobody ever waits for a copy out.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from vdnn import _C
from vdnn.planning.gaps import Gap
from vdnn.planning.policies.step_clock import StepClock
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


def release_when_copied(
    recording: Recording, clock: StepClock, gaps: Sequence[Gap], budget_bytes: int | None
) -> dict[Gap, int]:
    """Release points of those gaps for which there is a time at which the storage is away. `gaps` as gaps_of() orders
    them."""
    beginning: defaultdict[int, list[int]] = defaultdict(list)  # places in `gaps`, by interval
    copied: defaultdict[int, list[int]] = defaultdict(list)
    done_ns = _copied_ns(recording, clock, gaps)
    for place, gap in enumerate(gaps):
        beginning[gap.first].append(place)
        copied[max(clock.first_point_at(done_ns[gap.lifetime]) + 1, gap.first)].append(place)
    released: dict[Gap, int] = {}
    back_at: defaultdict[int, int] = defaultdict(int)  # bytes, by the first interval in which they are there again
    waiting: list[int] = []
    absent = 0

    def release(place: int, interval: int) -> int:
        gap = gaps[place]
        waiting.remove(place)
        released[gap] = interval - 1
        back_at[gap.last + 1] += gap.nbytes
        return gap.nbytes

    for interval, point in enumerate(recording.points):
        absent -= back_at[interval]
        for place in beginning[interval]:
            insort(waiting, place)
        for place in copied[interval]:
            if gaps[place] not in released and interval <= gaps[place].last:
                absent += release(place, interval)
        while budget_bytes is not None and point.peak_bytes - absent > budget_bytes:
            first_copied = next((place for place in waiting if interval <= gaps[place].last), None)
            if first_copied is None:
                break
            absent += release(first_copied, interval)
    return released


def _copied_ns(recording: Recording, clock: StepClock, gaps: Iterable[Gap]) -> dict[int, int]:
    """When the copy of each lifetime is done: one by one, in the order in which they can be made."""
    free_ns, done_ns = 0, {}
    for copy_point, lifetime in sorted({(recording.lifetimes[gap.lifetime].copy_point, gap.lifetime) for gap in gaps}):
        free_ns = max(free_ns, clock.reached_ns[copy_point])
        free_ns += clock.to_host_ns(recording.lifetimes[lifetime].nbytes)
        done_ns[lifetime] = free_ns
    return done_ns


def reload_within_room(
    recording: Recording, released: Mapping[Gap, int], wanted: Mapping[Gap, int], budget_bytes: int | None
) -> dict[Gap, Absence]:
    """Each brought back at the point at which it is wanted, or later if there is no room before; what is used first has
    the first choice. What no wish is given for is wanted as early as can be."""
    if budget_bytes is None:
        return brought_back_at(released, {gap: wanted.get(gap, 0) for gap in released})
    in_order = sorted(released, key=lambda one: (one.last, one.lifetime))
    # What is not used again is not brought back: nothing is taken for it.
    backs = _room(recording, released, budget_bytes).take_down(
        [
            (gap.last, gap.last + 1 if gap.use is None else max(wanted.get(gap, 0), released[gap] + 1) + 1, gap.nbytes)
            for gap in in_order
        ]
    )
    return {gap: _until(gap, released[gap], back) for gap, back in zip(in_order, backs, strict=True)}


def _room(recording: Recording, released: Mapping[Gap, int], budget_bytes: int) -> _C.Room:
    """With all of these away until they are used."""
    change = [0] * (len(recording.points) + 1)
    for gap, release_point in released.items():
        change[release_point + 1] += gap.nbytes
        change[gap.last + 1] -= gap.nbytes
    absent = accumulate(change)
    return _C.Room(
        [budget_bytes - point.peak_bytes + away for point, away in zip(recording.points, absent, strict=False)]
    )


def brought_back_at(released: Mapping[Gap, int], reload_points: Mapping[Gap, int]) -> dict[Gap, Absence]:
    """Whatever room there is; what no point is given for only when it is used."""
    return {gap: _until(gap, point, reload_points.get(gap, gap.last)) for gap, point in released.items()}


def _until(gap: Gap, release_point: int, reload_point: int) -> Absence:
    """Not brought back before it has gone, and by its use at the latest."""
    if gap.use is None or reload_point >= gap.use:
        return Absence(release_point)
    return Absence(release_point, max(reload_point, release_point + 1))
