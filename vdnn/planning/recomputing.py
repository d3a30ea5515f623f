"""The step as it is when some storages are given up without a copy and rebuilt from others: a Recording again.

A rebuild is a part of the step like any other: it uses what it reads, at points of their own right before the use that
asked for it; it computes, and its result is there from then on to the end. Whatever plans and foretells moves of a
recorded step does so of this one. A storage that is rebuilt, and is needed by another rebuild first, is rebuilt then.

What a codec leaves of a storage is a lifetime of its own: saved where it is made, used where it is decoded, and moved
like any other. These come behind the lifetimes of the recording, in the order of what they are left of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from vdnn.errors import VdnnError
from vdnn.planning.footprint import absent_intervals
from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Point, PointKind, Rebuild, Recording, key_of_encoded


def candidates_of(recording: Recording) -> list[int]:
    """What can be rebuilt and is away for a while then; what costs least for its bytes first."""
    found = []
    for index, lifetime in enumerate(recording.lifetimes):
        rebuild = lifetime.rebuild
        if rebuild is None or (lifetime.uses and lifetime.uses[0] <= rebuild.known_point):
            continue  # it is used before it could go
        if absent_intervals(lifetime, Absence(rebuild.known_point)):
            found.append((cost_ns(rebuild) / max(1, lifetime.nbytes - rebuild.kept_bytes), index))
    return [index for _, index in sorted(found)]


def cost_ns(rebuild: Rebuild) -> int:
    """Of giving up and making again."""
    return rebuild.giving_up_ns + rebuild.compute_ns


def planned_rebuild(lifetime: Lifetime) -> PlannedLifetime:
    """Of one that can be."""
    assert lifetime.rebuild is not None, "only what can be rebuilt is chosen"
    action = Action.COMPRESS if lifetime.rebuild.kept_bytes else Action.RECOMPUTE
    return PlannedLifetime(lifetime.nbytes, action)


def recording_under(recording: Recording, planned: Sequence[PlannedLifetime]) -> Recording:
    """With what these rebuild."""
    return with_rebuilds(recording, [index for index, one in enumerate(planned) if one.is_rebuilt])


def with_rebuilds(recording: Recording, chosen: Collection[int]) -> Recording:
    """`chosen`: the lifetimes that are rebuilt; the recording knows how. All keep their numbers; what codecs leave is
    behind them."""
    return _Rewriting(recording, frozenset(chosen)).run() if chosen else recording


class _Rewriting:
    """Places are points of the new step. `first_of` a point of the old is what happens first at it now, `place_of` it
    where it is itself. A search asks for thousands of such steps: what a place has is kept in lists, and of each point
    and each lifetime one object is made, when all of it is known."""

    def __init__(self, recording: Recording, chosen: frozenset[int]) -> None:
        self._recording = recording
        self._chosen = chosen
        # Of each place.
        self._old: list[Point | None] = []  # None: what a rebuild reads
        self._used: list[int | None] = []
        self._computed_ns: list[int] = []
        self._allocated: list[int] = []
        self._peaks: list[int] = []
        # Of each point of the old step.
        self._first_of: list[int] = []
        self._place_of: list[int] = []
        self._read_anew: dict[int, list[tuple[int, int]]] = {}  # by lifetime: used where, and read by when
        self._back: dict[int, int] = {}  # of the chosen: the interval in which it is rebuilt
        self._compute_ns = self._peak_bytes = 0  # of the interval that the next place ends
        self._ends: dict[int, int] = {}  # of what others are rebuilt from: it stays as long as their graph
        self._given_up: dict[int, list[int]] = {}  # before a point of the old step, leaving something behind
        self._left: dict[int, int] = {}  # of these the place where that is saved
        self._number: dict[int, int] = {}  # and its lifetime
        for index in sorted(chosen):
            rebuild, end_point = recording.lifetimes[index].rebuild, recording.lifetimes[index].end_point
            if rebuild is None:
                raise VdnnError(f"plan: lifetime {index} is to be rebuilt, and the recording does not know how.")
            for source in rebuild.inputs:
                own = recording.lifetimes[source].end_point
                self._ends[source] = max(self._ends.get(source, own), end_point)
            if rebuild.kept_bytes:
                self._given_up.setdefault(rebuild.known_point, []).append(index)
                self._number[index] = len(recording.lifetimes) + len(self._number)

    def run(self) -> Recording:
        missing = set(self._chosen)  # of which the first use is still to come
        for index, old in enumerate(self._recording.points):
            self._compute_ns, self._peak_bytes = old.compute_ns, old.peak_bytes
            self._first_of.append(len(self._used))
            for lifetime in self._given_up.get(index, ()):
                self._encode(lifetime, old.allocated_bytes)
            if old.lifetime in missing and old.kind is PointKind.USE:
                for lifetime in self._missing_for(old.lifetime, missing):
                    self._rebuild(lifetime, old.allocated_bytes)
                    missing.discard(lifetime)
            self._place_of.append(len(self._used))
            self._place(old, old.lifetime, old.allocated_bytes)
        self._count_bytes()
        lifetimes = tuple(map(self._lifetime, range(len(self._recording.lifetimes)), self._recording.lifetimes))
        left = tuple(map(self._lifetime_of_left, self._number))
        return replace(self._recording, points=self._points(), lifetimes=lifetimes + left)

    def _place(self, old: Point | None, used: int | None, allocated_bytes: int) -> None:
        self._old.append(old)
        self._used.append(used)
        self._computed_ns.append(self._compute_ns)
        self._allocated.append(allocated_bytes)
        self._peaks.append(self._peak_bytes)
        self._compute_ns, self._peak_bytes = 0, allocated_bytes

    def _missing_for(self, index: int, missing: Collection[int]) -> list[int]:
        """What has to be rebuilt before it can be used, in the runtime's order: it too, behind all that it reads."""
        found: dict[int, None] = {}
        waiting = [(index, False)]
        while waiting:
            one, is_ready = waiting.pop()
            if one not in missing or one in found:
                continue
            if is_ready:
                found[one] = None
                continue
            waiting.append((one, True))
            rebuild = self._recording.lifetimes[one].rebuild
            assert rebuild is not None, "only what can be rebuilt is chosen"
            waiting += [(source, False) for source in reversed(rebuild.inputs)]
        return list(found)

    def _encode(self, index: int, allocated_bytes: int) -> None:
        lifetime, number = self._recording.lifetimes[index], self._number[index]
        rebuild, saved = lifetime.rebuild, self._recording.points[lifetime.saves[0]].key
        assert rebuild is not None, "only what can be rebuilt is chosen"
        self._compute_ns += rebuild.giving_up_ns
        more_bytes = max(rebuild.kept_bytes, rebuild.giving_up_bytes)
        self._peak_bytes = max(self._peak_bytes, allocated_bytes + more_bytes)
        self._left[index] = len(self._used)
        key = None if saved is None else key_of_encoded(saved, rebuild.operation, rebuild.kept_bytes)
        self._place(Point(PointKind.SAVE, number, key, 0, 0, 0), number, allocated_bytes)

    def _rebuild(self, index: int, allocated_bytes: int) -> None:
        lifetime = self._recording.lifetimes[index]
        rebuild = lifetime.rebuild
        assert rebuild is not None, "only what can be rebuilt is chosen"
        begin = len(self._used)
        inputs = (*rebuild.inputs, self._number[index]) if rebuild.kept_bytes else rebuild.inputs
        for source in inputs:
            self._place(None, source, allocated_bytes)
        self._compute_ns += rebuild.compute_ns
        # Until now without it, of which from now on everything is counted as having it.
        self._peak_bytes = max(self._peak_bytes, allocated_bytes + rebuild.extra_bytes) - lifetime.nbytes
        self._back[index] = end = len(self._used)
        for place, source in enumerate(inputs, begin):
            self._read_anew.setdefault(source, []).append((place, end))

    def _count_bytes(self) -> None:
        """Takes off what is away until it is rebuilt, and adds what rebuilds hold on to."""
        change = [0] * (len(self._used) + 1)  # of the interval before a place
        for index in self._chosen:
            lifetime = self._recording.lifetimes[index]
            assert lifetime.rebuild is not None, "only what can be rebuilt is chosen"
            away = absent_intervals(lifetime, Absence(lifetime.rebuild.known_point))
            begin = self._first_of[away.start] if away.start < len(self._first_of) else len(self._used)
            if index in self._left and away.start == lifetime.rebuild.known_point + 1:
                begin = self._left[index] + 1
            end = self._back.get(index, self._first_of[lifetime.end_point] + 1)
            if begin < end:
                change[begin] -= lifetime.nbytes
                change[end] += lifetime.nbytes
        for index, place in self._left.items():
            left = self._lifetime_of_left(index)
            if place < left.end_point:
                change[place + 1] += left.nbytes
                change[left.end_point + 1] -= left.nbytes
        for index, end_point in self._ends.items():
            lifetime = self._recording.lifetimes[index]
            if lifetime.end_point < end_point:
                change[self._first_of[lifetime.end_point] + 1] += lifetime.nbytes
                change[self._first_of[end_point] + 1] -= lifetime.nbytes
        rebuilt = [0] * (len(self._used) + 1)  # in an interval: at the place before it they are not there yet
        for index, interval in self._back.items():
            rebuilt[interval] += self._recording.lifetimes[index].nbytes
        more = 0
        for place, changed in enumerate(change[:-1]):
            more += changed
            self._peaks[place] += more
            self._allocated[place] += more + change[place + 1] - rebuilt[place + 1]

    def _points(self) -> tuple[Point, ...]:
        return tuple(
            Point(PointKind.USE, used, None, compute_ns, allocated_bytes, peak_bytes)
            if old is None
            else Point(old.kind, used, old.key, compute_ns, allocated_bytes, peak_bytes, old.operation)
            for old, used, compute_ns, allocated_bytes, peak_bytes in zip(
                self._old, self._used, self._computed_ns, self._allocated, self._peaks, strict=True
            )
        )

    def _lifetime(self, index: int, old: Lifetime) -> Lifetime:
        first_of, place_of = self._first_of, self._place_of
        uses, read = [place_of[use] for use in old.uses], [first_of[done] for done in old.read]
        if index in self._read_anew:
            both = sorted([*zip(uses, read, strict=True), *self._read_anew[index]])
            uses, read = [use for use, _ in both], [done for _, done in both]
        end = first_of[self._ends.get(index, old.end_point)]
        return Lifetime(
            old.nbytes,
            tuple([place_of[save] for save in old.saves]),
            tuple(uses),
            tuple(read),
            place_of[old.copy_point],
            end if index in self._chosen else first_of[old.free_point],  # else it would be moved, too
            end,
        )

    def _lifetime_of_left(self, index: int) -> Lifetime:
        """Of what a codec leaves of this one: nobody else holds it, and it may be moved."""
        old, place = self._recording.lifetimes[index], self._left[index]
        assert old.rebuild is not None, "only what can be rebuilt is chosen"
        reads = self._read_anew.get(self._number[index], [])
        uses, read = tuple(use for use, _ in reads), tuple(done for _, done in reads)
        end = self._first_of[self._ends.get(index, old.end_point)]
        return Lifetime(old.rebuild.kept_bytes, (place,), uses, read, place, place, max(place, end))
