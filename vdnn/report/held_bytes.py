"""What lies on the device in every interval of a step, by what the plan does with it: the layers of a picture.

An interval ends at a point, as everywhere in planning; its height is the highest that was allocated in it. Before: with
everything kept. After: under the plan, in which what is rebuilt is away from when it may be given up to its first use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vdnn.planning.footprint import absent_intervals, interval_bytes
from vdnn.planning.rebuilding import recording_under
from vdnn.recording import Lifetime, Recording
from vdnn.step_plan import Absence, Action, Plan, PlannedLifetime
from vdnn.timeline import Timeline


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Lists have one number for each interval. `ends_ns` is when it ends, `total` the highest allocated in it,
    `storages` what each storage holds of that, by its number."""

    ends_ns: tuple[int, ...]
    total: tuple[int, ...]
    storages: tuple[tuple[range, ...], ...]
    sizes: tuple[int, ...]

    def bytes_of(self, lifetimes: Sequence[int]) -> list[int]:
        """Of all these, in every interval."""
        change = [0] * (len(self.total) + 1)
        for lifetime in lifetimes:
            for there in self.storages[lifetime]:
                change[there.start] += self.sizes[lifetime]
                change[there.stop] -= self.sizes[lifetime]
        held, found = 0, []
        for more in change[:-1]:
            held += more
            found.append(held)
        return found

    def besides(self) -> list[int]:
        """Parameters, gradients, workspaces: what is no storage of the plan's."""
        managed = self.bytes_of(range(len(self.sizes)))
        return [max(0, total - held) for total, held in zip(self.total, managed, strict=True)]


def actions_of(recording: Recording, plan: Plan | None) -> tuple[Action | None, ...]:
    """Of every storage; None where nobody planned."""
    return (None,) * len(recording.lifetimes) if plan is None else tuple(one.action for one in plan.lifetimes)


def held_before(recording: Recording) -> HeldBytes:
    """With everything kept, and no time lost."""
    now, ends = 0, []
    for point in recording.points:
        now += point.compute_ns
        ends.append(now)
    return HeldBytes(
        tuple(ends),
        tuple(point.peak_bytes for point in recording.points),
        tuple((_alive(lifetime),) for lifetime in recording.lifetimes),
        tuple(lifetime.nbytes for lifetime in recording.lifetimes),
    )


def held_after(recording: Recording, plan: Plan, timeline: Timeline | None) -> HeldBytes:
    """Under the plan: what lies where by the plan, when by the timeline."""
    followed = recording_under(recording, plan.lifetimes)
    places = _Places(recording, followed)
    storages = []
    for old, new, planned in zip(recording.lifetimes, followed.lifetimes, plan.lifetimes, strict=True):
        away = list(_away(old, new, planned, places, len(followed.points)))
        storages.append(tuple(_without(_alive(new), away)))
    return HeldBytes(
        _ends(followed, timeline),
        tuple(interval_bytes(followed, plan.lifetimes)),
        tuple(storages),
        tuple(lifetime.nbytes for lifetime in recording.lifetimes),
    )


class _Places:
    """Where points of the recorded step are in the step with the plan's rebuilds: saves tell, and before the first use
    nothing comes between."""

    def __init__(self, recording: Recording, followed: Recording) -> None:
        pairs = sorted(
            (before, after)
            for old, new in zip(recording.lifetimes, followed.lifetimes, strict=True)
            for before, after in zip(old.saves, new.saves, strict=True)
        )
        self._old = [before for before, _ in pairs]
        self._new = [after for _, after in pairs]

    def of(self, point: int) -> int:
        nearest = bisect_right(self._old, point) - 1
        return point if nearest < 0 else self._new[nearest] + point - self._old[nearest]


def _alive(lifetime: Lifetime) -> range:
    """In the interval of its first save it was made."""
    return range(lifetime.saves[0], lifetime.end_point + 1)


def _away(old: Lifetime, new: Lifetime, planned: PlannedLifetime, places: _Places, count: int) -> Iterator[range]:
    for absence in planned.absences:
        yield absent_intervals(new, absence)
    if planned.is_rebuilt and old.rebuild is not None:
        gone = absent_intervals(old, Absence(old.rebuild.known_point))
        begin = places.of(gone.start)
        yield range(begin, next((use for use in new.uses if use >= begin), count))


def _without(there: range, away: Sequence[range]) -> Iterator[range]:
    begin = there.start
    for gone in sorted((one for one in away if one), key=lambda one: one.start):
        if begin < gone.start:
            yield range(begin, min(gone.start, there.stop))
        begin = max(begin, gone.stop)
    if begin < there.stop:
        yield range(begin, there.stop)


def _ends(followed: Recording, timeline: Timeline | None) -> tuple[int, ...]:
    """When each point was left. One that has no mark of its own was left with the one before."""
    if timeline is None:
        return held_before(followed).ends_ns
    left: dict[int, int] = {mark.point: mark.end_ns for mark in timeline.marks}
    now, ends = 0, []
    for point in range(len(followed.points)):
        now = max(now, left.get(point, now))
        ends.append(now)
    return tuple(ends)
