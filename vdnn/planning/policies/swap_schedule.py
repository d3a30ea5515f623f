"""Release and reload points for a choice of gaps, as most published schedulers set them.

A storage is released when its copy is complete, and reloaded at the point that the policy asks for. If memory is short,
storages are released earlier, in the order of their copies, and the step waits for these copies; reloads are issued
later. Capuchin and vDNN++ behave so because an allocation blocks, AutoSwap by its rule "stick to limit". Without a
budget the step never waits for a copy to the host.
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
    """Release points of the gaps, which are in the order of gaps_of(). A gap that ends before its copy is complete is
    left out, unless the budget needs it."""
    beginning: defaultdict[int, list[int]] = defaultdict(list)  # by interval: indices of `gaps`
    copied: defaultdict[int, list[int]] = defaultdict(list)
    copied_ns = _copied_ns(recording, clock, gaps)
    for index, gap in enumerate(gaps):
        beginning[gap.first].append(index)
        copied[max(clock.first_point_at(copied_ns[gap.lifetime]) + 1, gap.first)].append(index)
    released: dict[Gap, int] = {}
    reloaded_at: defaultdict[int, int] = defaultdict(int)  # bytes, by the first interval after the gap
    waiting: list[int] = []
    absent = 0

    def release(index: int, interval: int) -> int:
        gap = gaps[index]
        waiting.remove(index)
        released[gap] = interval - 1
        reloaded_at[gap.last + 1] += gap.nbytes
        return gap.nbytes

    for interval, point in enumerate(recording.points):
        absent -= reloaded_at[interval]
        for index in beginning[interval]:
            insort(waiting, index)
        for index in copied[interval]:
            if gaps[index] not in released and interval <= gaps[index].last:
                absent += release(index, interval)
        while budget_bytes is not None and point.peak_bytes - absent > budget_bytes:
            first_copied = next((index for index in waiting if interval <= gaps[index].last), None)
            if first_copied is None:
                break
            absent += release(first_copied, interval)
    return released


def _copied_ns(recording: Recording, clock: StepClock, gaps: Iterable[Gap]) -> dict[int, int]:
    """The time at which the copy of each lifetime is complete. Copies run one by one, in the order of copy points."""
    free_ns, copied_ns = 0, {}
    for copy_point, lifetime in sorted({(recording.lifetimes[gap.lifetime].copy_point, gap.lifetime) for gap in gaps}):
        free_ns = max(free_ns, clock.reached_ns[copy_point])
        free_ns += clock.to_host_ns(recording.lifetimes[lifetime].nbytes)
        copied_ns[lifetime] = free_ns
    return copied_ns


def reload_within_room(
    recording: Recording, released: Mapping[Gap, int], wanted: Mapping[Gap, int], budget_bytes: int | None
) -> dict[Gap, Absence]:
    """Absences that reload each gap at the point in `wanted`, or later if there is no room before. The gap that is used
    first chooses first. A gap without a wanted point is reloaded as early as possible."""
    if budget_bytes is None:
        return brought_back_at(released, {gap: wanted.get(gap, 0) for gap in released})
    in_order = sorted(released, key=lambda one: (one.last, one.lifetime))
    # A storage that is not used again is not reloaded and takes no room.
    reload_points = _room(recording, released, budget_bytes).take_down(
        [
            (gap.last, gap.last + 1 if gap.use is None else max(wanted.get(gap, 0), released[gap] + 1) + 1, gap.nbytes)
            for gap in in_order
        ]
    )
    return {gap: _until(gap, released[gap], point) for gap, point in zip(in_order, reload_points, strict=True)}


def _room(recording: Recording, released: Mapping[Gap, int], budget_bytes: int) -> _C.Room:
    """The room under the budget in every interval, with all of these storages absent until their uses."""
    change = [0] * (len(recording.points) + 1)
    for gap, release_point in released.items():
        change[release_point + 1] += gap.nbytes
        change[gap.last + 1] -= gap.nbytes
    absent = accumulate(change)
    return _C.Room(
        [budget_bytes - point.peak_bytes + nbytes for point, nbytes in zip(recording.points, absent, strict=False)]
    )


def brought_back_at(released: Mapping[Gap, int], reload_points: Mapping[Gap, int]) -> dict[Gap, Absence]:
    """Absences that reload each gap at its reload point, or at its use if it has none, whatever room there is."""
    return {gap: _until(gap, point, reload_points.get(gap, gap.last)) for gap, point in released.items()}


def _until(gap: Gap, release_point: int, reload_point: int) -> Absence:
    """The absence up to `reload_point`, at the earliest right after the release, and at the latest at the use."""
    if gap.use is None or reload_point >= gap.use:
        return Absence(release_point)
    return Absence(release_point, max(reload_point, release_point + 1))
