"""The step as it is when some storages are given up without a copy and rebuilt from others: a Recording again.

A rebuild is a part of the step like any other: it uses what it reads, at points of their own right before the use that
asked for it; it computes, and its result is there from then on to the end. Whatever plans and foretells moves of a
recorded step does so of this one. A storage that is rebuilt, and is needed by another rebuild first, is rebuilt then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from vdnn.errors import VdnnError
from vdnn.planning.footprint import absent_intervals
from vdnn.recording import Lifetime, Point, PointKind, Rebuild, Recording
from vdnn.step_plan import Absence, Action, PlannedLifetime


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
    """`chosen`: the lifetimes that are rebuilt; the recording knows how. All keep their numbers."""
    return _Rewriting(recording, frozenset(chosen)).run() if chosen else recording


class _Rewriting:
    """Places are points of the new step. `first_of` a point of the old is what happens first at it now, `place_of` it
    where it is itself."""

    def __init__(self, recording: Recording, chosen: frozenset[int]) -> None:
        self._recording = recording
        self._chosen = chosen
        self._points: list[Point] = []
        self._first_of: list[int] = []
        self._place_of: list[int] = []
        self._read_anew: dict[int, list[tuple[int, int]]] = {}  # by lifetime: used where, and read by when
        self._back: dict[int, int] = {}  # of the chosen: the interval in which it is rebuilt
        self._compute_ns = self._peak_bytes = 0  # of the interval that the next place ends
        self._readers: dict[int, list[int]] = {}
        self._given_up: dict[int, list[Rebuild]] = {}  # before a point of the old step, leaving something behind
        for index in chosen:
            rebuild = recording.lifetimes[index].rebuild
            if rebuild is None:
                raise VdnnError(f"plan: lifetime {index} is to be rebuilt, and the recording does not know how.")
            for source in rebuild.inputs:
                self._readers.setdefault(source, []).append(index)
            if rebuild.kept_bytes:
                self._given_up.setdefault(rebuild.known_point, []).append(rebuild)

    def run(self) -> Recording:
        for index, old in enumerate(self._recording.points):
            self._compute_ns, self._peak_bytes = old.compute_ns, old.peak_bytes
            for rebuild in self._given_up.get(index, ()):
                self._compute_ns += rebuild.giving_up_ns
                self._peak_bytes = max(self._peak_bytes, old.allocated_bytes + rebuild.kept_bytes)
            self._first_of.append(len(self._points))
            if old.kind is PointKind.USE and old.lifetime is not None:
                for lifetime in self._missing_for(old.lifetime):
                    self._rebuild(lifetime, old.allocated_bytes)
            self._place(replace(old, compute_ns=self._compute_ns, peak_bytes=self._peak_bytes))
            self._place_of.append(len(self._points) - 1)
        self._count_bytes()
        lifetimes = tuple(self._lifetime(index, one) for index, one in enumerate(self._recording.lifetimes))
        return replace(self._recording, points=tuple(self._points), lifetimes=lifetimes)

    def _place(self, point: Point) -> None:
        self._points.append(point)
        self._compute_ns, self._peak_bytes = 0, point.allocated_bytes

    def _missing_for(self, index: int) -> list[int]:
        """What has to be rebuilt before it can be used, in the runtime's order: it too, behind all that it reads."""
        missing: dict[int, None] = {}
        waiting = [(index, False)]
        while waiting:
            one, is_ready = waiting.pop()
            if one not in self._chosen or one in self._back or one in missing:
                continue
            if is_ready:
                missing[one] = None
                continue
            waiting.append((one, True))
            rebuild = self._recording.lifetimes[one].rebuild
            assert rebuild is not None, "only what can be rebuilt is chosen"
            waiting += [(source, False) for source in reversed(rebuild.inputs)]
        return list(missing)

    def _rebuild(self, index: int, allocated_bytes: int) -> None:
        lifetime = self._recording.lifetimes[index]
        rebuild = lifetime.rebuild
        assert rebuild is not None, "only what can be rebuilt is chosen"
        used = []
        for source in rebuild.inputs:
            used.append((source, len(self._points)))
            self._place(Point(PointKind.USE, source, None, self._compute_ns, allocated_bytes, self._peak_bytes))
        self._compute_ns += rebuild.compute_ns
        # Until now without it, of which from now on everything is counted as having it.
        self._peak_bytes = max(self._peak_bytes, allocated_bytes + rebuild.extra_bytes) - lifetime.nbytes
        self._back[index] = len(self._points)
        for source, place in used:
            self._read_anew.setdefault(source, []).append((place, len(self._points)))

    def _count_bytes(self) -> None:
        """Takes off what is away until it is rebuilt, and adds what rebuilds hold on to."""
        change = [0] * (len(self._points) + 1)  # of the interval before a place
        for index in self._chosen:
            lifetime = self._recording.lifetimes[index]
            assert lifetime.rebuild is not None, "only what can be rebuilt is chosen"
            away = absent_intervals(lifetime, Absence(lifetime.rebuild.known_point))
            begin = self._first_of[away.start] if away.start < len(self._first_of) else len(self._points)
            end = self._back.get(index, self._first_of[lifetime.end_point] + 1)
            if begin < end:
                change[begin] -= lifetime.nbytes
                change[end] += lifetime.nbytes
            kept_from = self._first_of[lifetime.rebuild.known_point] + 1
            change[kept_from] += lifetime.rebuild.kept_bytes
            change[max(kept_from, self._first_of[lifetime.end_point] + 1)] -= lifetime.rebuild.kept_bytes
        for index, lifetime in enumerate(self._recording.lifetimes):
            end, later = self._first_of[lifetime.end_point], self._end_of(index)
            if end < later:
                change[end + 1] += lifetime.nbytes
                change[later + 1] -= lifetime.nbytes
        rebuilt = [0] * (len(self._points) + 1)  # in an interval: at the place before it they are not there yet
        for index, interval in self._back.items():
            rebuilt[interval] += self._recording.lifetimes[index].nbytes
        more = 0
        for place, point in enumerate(self._points):
            more += change[place]
            left = more + change[place + 1] - rebuilt[place + 1]
            self._points[place] = replace(
                point, allocated_bytes=point.allocated_bytes + left, peak_bytes=point.peak_bytes + more
            )

    def _end_of(self, index: int) -> int:
        """What another can be rebuilt from stays as long as that one's graph."""
        end = self._recording.lifetimes[index].end_point
        for reader in self._readers.get(index, ()):
            end = max(end, self._recording.lifetimes[reader].end_point)
        return self._first_of[end]

    def _lifetime(self, index: int, old: Lifetime) -> Lifetime:
        reads = [(self._place_of[use], self._first_of[read]) for use, read in zip(old.uses, old.read, strict=True)]
        reads = sorted([*reads, *self._read_anew.get(index, ())])
        end = self._end_of(index)
        is_chosen = index in self._chosen
        return replace(
            old,
            saves=tuple(self._place_of[save] for save in old.saves),
            uses=tuple(use for use, _ in reads),
            read=tuple(read for _, read in reads),
            copy_point=self._place_of[old.copy_point],
            free_point=end if is_chosen else self._first_of[old.free_point],  # else it would be moved, too
            end_point=end,
            rebuild=None,
        )
