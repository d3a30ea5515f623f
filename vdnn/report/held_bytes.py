"""What lies on the device in every interval of a step, by what the plan does with it: the layers of a picture.

An interval ends at a point, as everywhere in planning; its height is the highest that was allocated in it. Before: with
everything kept. After: under the plan, in which what is rebuilt is away from when it may be given up to its first use.
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
    """Lists have one number for each interval. `ends_ns` is when it ends, `total` the highest allocated in it by the
    plan, `storages` where each storage is there, by its number. `measured` is the highest by the timeline."""

    ends_ns: tuple[int, ...]
    total: tuple[int, ...]
    storages: tuple[tuple[range, ...], ...]
    sizes: tuple[int, ...]
    measured: tuple[int, ...] | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.total if self.measured is None else self.measured)

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
    """Of every storage, by what was recorded first and what codecs leave of it behind; None where nobody planned."""
    if plan is None:
        return (None,) * len(recording.lifetimes)
    recorded = len(recording.lifetimes)
    actions = (one.action for one in plan.lifetimes)
    return tuple(Action.COMPRESS if place >= recorded else action for place, action in enumerate(actions))


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
    rebuilt = _rebuilt_intervals(recording, followed, plan)
    storages = []
    for index, (lifetime, planned) in enumerate(zip(followed.lifetimes, plan.lifetimes, strict=True)):
        away = [absent_intervals(lifetime, absence) for absence in planned.absences]
        storages.append(tuple(_without(_alive(lifetime), [*away, *rebuilt.get(index, ())])))
    return HeldBytes(
        _ends(followed, timeline),
        tuple(interval_bytes(followed, plan.lifetimes)),
        tuple(storages),
        tuple(lifetime.nbytes for lifetime in followed.lifetimes),
        None if timeline is None or timeline.source != "measured" else peaks_at_points(len(followed.points), timeline),
    )


def _rebuilt_intervals(recording: Recording, followed: Recording, plan: Plan) -> dict[int, tuple[range, ...]]:
    """Of what is rebuilt: from when it was given up to its first use."""
    count = len(recording.lifetimes)
    chosen = [index for index, planned in enumerate(plan.lifetimes[:count]) if planned.is_rebuilt]
    encoded = (index for index in chosen if plan.lifetimes[index].action is Action.COMPRESS)
    left = {index: followed.lifetimes[number].saves[0] for number, index in enumerate(encoded, start=count)}
    begins = _first_places(recording, followed)
    found: dict[int, tuple[range, ...]] = {}
    for index in chosen:
        old, new = recording.lifetimes[index], followed.lifetimes[index]
        assert old.rebuild is not None, "the plan is for this recording"
        gone = absent_intervals(old, Absence(old.rebuild.known_point)).start
        begin = begins[min(gone, len(begins) - 1)] + max(0, gone - len(begins) + 1)
        if index in left and gone == old.rebuild.known_point + 1:
            begin = left[index] + 1  # as soon as the codec has run
        found[index] = (range(begin, next((use for use in new.uses if use >= begin), len(followed.points))),)
    return found


def _first_places(recording: Recording, followed: Recording) -> list[int]:
    """Of the points up to the first use: what happens first at them in the step with rebuilds, in which codecs run
    between them."""
    places = [0]
    for place, point in enumerate(followed.points):
        if point.kind is PointKind.USE:
            break
        if point.lifetime is None or point.lifetime < len(recording.lifetimes):
            places.append(place + 1)
    return places


def _alive(lifetime: Lifetime) -> range:
    """In the interval of its first save it was made."""
    return range(lifetime.saves[0], lifetime.end_point + 1)


def _without(there: range, away: Sequence[range]) -> Iterator[range]:
    begin = there.start
    for gone in sorted((one for one in away if one), key=lambda one: one.start):
        if begin < gone.start:
            yield range(begin, min(gone.start, there.stop))
        begin = max(begin, gone.stop)
    if begin < there.stop:
        yield range(begin, there.stop)


def peaks_at_points(count: int, timeline: Timeline) -> tuple[int, ...]:
    """Several marks may be at one point; one without a mark has what the one before left."""
    highest: dict[int, int] = {}
    for mark in timeline.marks:
        highest[mark.point] = max(highest.get(mark.point, 0), mark.peak_bytes)
    found, before = [], next(iter(highest.values()), 0)
    for point in range(count):
        before = highest.get(point, before)
        found.append(before)
    return tuple(found)


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
