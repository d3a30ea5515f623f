"""HeldBytes: the bytes on the device in every interval of a step, by the storages that are there.

An interval ends at a point, as everywhere in planning; its height is the most bytes allocated in it. `held_before` is
the step with everything kept, and `held_after` the step under the plan. A recomputed storage is off the device from the
point at which it may be discarded to its first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vdnn.planning.footprint import absent_intervals, interval_bytes
from vdnn.planning.recomputing import recording_under
from vdnn.step.plan import Absence, Action, Plan
from vdnn.step.recording import Lifetime, PointKind, Recording
from vdnn.step.timeline import Timeline


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The tuples have one number for each interval, except `storages` and `sizes`, which have one entry per storage.

    `ends_ns` is the time at which the interval ends, and `total` the most bytes allocated in it by the plan.
    `storages` has the intervals in which each storage is on the device. `measured` is the peak by the timeline.
    """

    ends_ns: tuple[int, ...]
    total: tuple[int, ...]
    storages: tuple[tuple[range, ...], ...]
    sizes: tuple[int, ...]
    measured: tuple[int, ...] | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.total if self.measured is None else self.measured)

    def bytes_of(self, lifetimes: Sequence[int]) -> list[int]:
        """The bytes of these lifetimes in every interval."""
        change = [0] * (len(self.total) + 1)
        for lifetime in lifetimes:
            for present in self.storages[lifetime]:
                change[present.start] += self.sizes[lifetime]
                change[present.stop] -= self.sizes[lifetime]
        held, found = 0, []
        for more in change[:-1]:
            held += more
            found.append(held)
        return found

    def besides(self) -> list[int]:
        """The bytes in every interval that are not the plan's: parameters, gradients and workspaces."""
        managed = self.bytes_of(range(len(self.sizes)))
        return [max(0, total - held) for total, held in zip(self.total, managed, strict=True)]


def actions_of(recording: Recording, plan: Plan | None) -> tuple[Action | None, ...]:
    """The action of every storage: first recorded storages, then the encoded bytes of codecs. None without a plan."""
    if plan is None:
        return (None,) * len(recording.lifetimes)
    recorded = len(recording.lifetimes)
    actions = (one.action for one in plan.lifetimes)
    return tuple(Action.COMPRESS if index >= recorded else action for index, action in enumerate(actions))


def held_before(recording: Recording) -> HeldBytes:
    """The step with everything kept and without stalls."""
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
    """The step under the plan. The storages on the device are the plan's, the times the timeline's."""
    followed = recording_under(recording, plan.lifetimes)
    recomputed = _recomputed_intervals(recording, followed, plan)
    storages = []
    for index, (lifetime, planned) in enumerate(zip(followed.lifetimes, plan.lifetimes, strict=True)):
        absent = [absent_intervals(lifetime, absence) for absence in planned.absences]
        storages.append(tuple(_without(_alive(lifetime), [*absent, *recomputed.get(index, ())])))
    return HeldBytes(
        _ends(followed, timeline),
        tuple(interval_bytes(followed, plan.lifetimes)),
        tuple(storages),
        tuple(lifetime.nbytes for lifetime in followed.lifetimes),
        None if timeline is None or timeline.source != "measured" else peaks_at_points(len(followed.points), timeline),
    )


def _recomputed_intervals(recording: Recording, followed: Recording, plan: Plan) -> dict[int, tuple[range, ...]]:
    """The interval of each recomputed storage from its discard to its first use."""
    count = len(recording.lifetimes)
    chosen = [index for index, planned in enumerate(plan.lifetimes[:count]) if planned.is_recomputed]
    encoded = (index for index in chosen if plan.lifetimes[index].action is Action.COMPRESS)
    encoded_at = {index: followed.lifetimes[number].saves[0] for number, index in enumerate(encoded, start=count)}
    begins = _interval_begins(recording, followed)
    found: dict[int, tuple[range, ...]] = {}
    for index in chosen:
        old, new = recording.lifetimes[index], followed.lifetimes[index]
        if old.recompute is None:
            raise RuntimeError(f"the plan recomputes storage {index}, which has no recompute in this recording.")
        absent_from = absent_intervals(old, Absence(old.recompute.known_point)).start
        begin = begins[min(absent_from, len(begins) - 1)] + max(0, absent_from - len(begins) + 1)
        if index in encoded_at and absent_from == old.recompute.known_point + 1:
            begin = encoded_at[index] + 1  # as soon as the codec has run
        found[index] = (range(begin, next((use for use in new.uses if use >= begin), len(followed.points))),)
    return found


def _interval_begins(recording: Recording, followed: Recording) -> list[int]:
    """The begin of each recorded interval up to the first use, in the step with recomputes. Codecs add points there."""
    begins = [0]
    for index, point in enumerate(followed.points):
        if point.kind is PointKind.USE:
            break
        if point.lifetime is None or point.lifetime < len(recording.lifetimes):
            begins.append(index + 1)
    return begins


def _alive(lifetime: Lifetime) -> range:
    """The intervals in which the storage exists, from that of its first save to that of its end."""
    return range(lifetime.saves[0], lifetime.end_point + 1)


def _without(alive: range, absences: Sequence[range]) -> Iterator[range]:
    """The parts of `alive` outside all `absences`."""
    begin = alive.start
    for absence in sorted((one for one in absences if one), key=lambda one: one.start):
        if begin < absence.start:
            yield range(begin, min(absence.start, alive.stop))
        begin = max(begin, absence.stop)
    if begin < alive.stop:
        yield range(begin, alive.stop)


def peaks_at_points(count: int, timeline: Timeline) -> tuple[int, ...]:
    """The peak at each point. A point may have several marks; one without a mark has the peak of the point before."""
    highest: dict[int, int] = {}
    for mark in timeline.marks:
        highest[mark.point] = max(highest.get(mark.point, 0), mark.peak_bytes)
    found, before = [], next(iter(highest.values()), 0)
    for point in range(count):
        before = highest.get(point, before)
        found.append(before)
    return tuple(found)


def _ends(followed: Recording, timeline: Timeline | None) -> tuple[int, ...]:
    """The end of each interval in ns. A point without a mark has the time of the point before."""
    if timeline is None:
        return held_before(followed).ends_ns
    mark_ends: dict[int, int] = {mark.point: mark.end_ns for mark in timeline.marks}
    now, ends = 0, []
    for point in range(len(followed.points)):
        now = max(now, mark_ends.get(point, now))
        ends.append(now)
    return tuple(ends)
