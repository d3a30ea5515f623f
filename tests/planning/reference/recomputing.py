"""The readable form of RecordedStep::recomputed() in csrc/planning/recorded_step.h: the step with recomputes.

See [Note: Recomputes as points] there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.recomputing import cost_ns, host_cost_ns
from vdnn.step.plan import Absence
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, key_of_encoded


def rewritten(recording: Recording, chosen: frozenset[int]) -> Recording:
    """The step in which the lifetimes `chosen` are recomputed by the recipes of the recording."""
    return _Rewriting(recording, chosen).run() if chosen else recording


def ordered_candidates(recording: Recording, *, by_issue: bool) -> list[int]:
    """Lifetimes that can be recomputed and would then be absent for an interval; the least cost per byte first."""
    found = []
    for index, lifetime in enumerate(recording.lifetimes):
        recompute = lifetime.recompute
        if recompute is None or (lifetime.uses and lifetime.uses[0] <= recompute.known_point):
            continue  # used before it could be discarded
        if absent_intervals(lifetime, Absence(recompute.known_point)):
            cost = host_cost_ns(recompute) if by_issue else cost_ns(recompute)
            found.append((cost / max(1, lifetime.nbytes - recompute.kept_bytes), index))
    return [index for _, index in sorted(found)]


class _Rewriting:
    """Makes the points and lifetimes of the new step. A place is the index of a point of the new step. For a point of
    the old step, `place_of` is its own place, and `first_of` is the place of the first recompute or encoding before it.
    """

    def __init__(self, recording: Recording, chosen: frozenset[int]) -> None:
        self._recording = recording
        self._chosen = chosen
        # One item for each place.
        self._old: list[Point | None] = []  # None: an input that a recompute reads
        self._used: list[int | None] = []
        self._computed_ns: list[int] = []
        self._issued_ns: list[int] = []
        self._allocated: list[int] = []
        self._peaks: list[int] = []
        # One item for each point of the old step.
        self._first_of: list[int] = []
        self._place_of: list[int] = []
        self._recipe_uses: dict[int, list[tuple[int, int]]] = {}  # by lifetime: place of the use, place when it is read
        self._recomputed_in: dict[int, int] = {}  # by chosen lifetime: the interval of its recompute
        self._compute_ns = self._issue_ns = self._peak_bytes = 0  # of the interval that the next place ends
        self._ends: dict[int, int] = {}  # by input of a recompute: it is held as long as the graph of its readers
        self._encoded_before: dict[int, list[int]] = {}  # by point of the old step: lifetimes that a codec encodes
        self._encoded_at: dict[int, int] = {}  # by encoded lifetime: the place at which the rest is saved
        self._number: dict[int, int] = {}  # by encoded lifetime: the number of the lifetime of the rest
        self._recomputes: dict[int, Recompute] = {}
        for index in sorted(chosen):
            recompute, end_point = recording.lifetimes[index].recompute, recording.lifetimes[index].end_point
            assert recompute is not None
            self._recomputes[index] = recompute
            for source in recompute.inputs:
                own = recording.lifetimes[source].end_point
                self._ends[source] = max(self._ends.get(source, own), end_point)
            if recompute.kept_bytes:
                self._encoded_before.setdefault(recompute.known_point, []).append(index)
                self._number[index] = len(recording.lifetimes) + len(self._number)

    def run(self) -> Recording:
        missing = set(self._chosen)  # not yet recomputed
        for index, old in enumerate(self._recording.points):
            self._compute_ns, self._issue_ns, self._peak_bytes = old.compute_ns, old.issue_ns, old.peak_bytes
            self._first_of.append(len(self._used))
            for lifetime in self._encoded_before.get(index, ()):
                self._encode(lifetime, old.allocated_bytes)
            if old.lifetime in missing and old.kind is PointKind.USE:
                for lifetime in self._missing_for(old.lifetime, missing):
                    self._recompute(lifetime, old.allocated_bytes)
                    missing.discard(lifetime)
            self._place_of.append(len(self._used))
            self._place(old, old.lifetime, old.allocated_bytes)
        self._count_bytes()
        lifetimes = tuple(map(self._lifetime, range(len(self._recording.lifetimes)), self._recording.lifetimes))
        encoded = tuple(map(self._lifetime_of_encoded, self._number))
        return replace(self._recording, points=self._points(), lifetimes=lifetimes + encoded)

    def _place(self, old: Point | None, used: int | None, allocated_bytes: int) -> None:
        self._old.append(old)
        self._used.append(used)
        self._computed_ns.append(self._compute_ns)
        self._issued_ns.append(self._issue_ns)
        self._allocated.append(allocated_bytes)
        self._peaks.append(self._peak_bytes)
        self._compute_ns, self._issue_ns, self._peak_bytes = 0, 0, allocated_bytes

    def _missing_for(self, index: int, missing: Collection[int]) -> list[int]:
        """All that has to be recomputed before a use of `index`, in the runtime's order: inputs first, itself last."""
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
            waiting += [(source, False) for source in reversed(self._recomputes[one].inputs)]
        return list(found)

    def _encode(self, index: int, allocated_bytes: int) -> None:
        recompute, number = self._recomputes[index], self._number[index]
        saved = self._recording.points[self._recording.lifetimes[index].saves[0]].key
        self._compute_ns += recompute.discard_ns
        self._issue_ns += recompute.discard_issue_ns
        more_bytes = max(recompute.kept_bytes, recompute.discard_bytes)
        self._peak_bytes = max(self._peak_bytes, allocated_bytes + more_bytes)
        self._encoded_at[index] = len(self._used)
        key = None if saved is None else key_of_encoded(saved, recompute.operation, recompute.kept_bytes)
        self._place(Point(PointKind.SAVE, number, key, 0, 0, 0), number, allocated_bytes)

    def _recompute(self, index: int, allocated_bytes: int) -> None:
        lifetime, recompute = self._recording.lifetimes[index], self._recomputes[index]
        begin = len(self._used)
        inputs = (*recompute.inputs, self._number[index]) if recompute.kept_bytes else recompute.inputs
        for source in inputs:
            self._place(None, source, allocated_bytes)
        self._compute_ns += recompute.compute_ns
        self._issue_ns += recompute.issue_ns
        # The storage is absent up to here. _count_bytes() counts it as present in all later intervals.
        self._peak_bytes = max(self._peak_bytes, allocated_bytes + recompute.extra_bytes) - lifetime.nbytes
        self._recomputed_in[index] = end = len(self._used)
        for place, source in enumerate(inputs, begin):
            self._recipe_uses.setdefault(source, []).append((place, end))

    def _count_bytes(self) -> None:
        """Subtracts storages that are absent until their recompute, and adds inputs that recomputes hold longer."""
        change = [0] * (len(self._used) + 1)  # of the interval before a place
        for index in self._chosen:
            lifetime, known_point = self._recording.lifetimes[index], self._recomputes[index].known_point
            absent = absent_intervals(lifetime, Absence(known_point))
            begin = self._first_of[absent.start] if absent.start < len(self._first_of) else len(self._used)
            if index in self._encoded_at and absent.start == known_point + 1:
                begin = self._encoded_at[index] + 1
            end = self._recomputed_in.get(index, self._first_of[lifetime.end_point] + 1)
            if begin < end:
                change[begin] -= lifetime.nbytes
                change[end] += lifetime.nbytes
        for index, place in self._encoded_at.items():
            encoded = self._lifetime_of_encoded(index)
            if place < encoded.end_point:
                change[place + 1] += encoded.nbytes
                change[encoded.end_point + 1] -= encoded.nbytes
        for index, end_point in self._ends.items():
            lifetime = self._recording.lifetimes[index]
            if lifetime.end_point < end_point:
                change[self._first_of[lifetime.end_point] + 1] += lifetime.nbytes
                change[self._first_of[end_point] + 1] -= lifetime.nbytes
        recomputed = [0] * (len(self._used) + 1)  # bytes of an interval's recomputes, absent at the place before it
        for index, interval in self._recomputed_in.items():
            recomputed[interval] += self._recording.lifetimes[index].nbytes
        more = 0
        for place, changed in enumerate(change[:-1]):
            more += changed
            self._peaks[place] += more
            self._allocated[place] += more + change[place + 1] - recomputed[place + 1]

    def _points(self) -> tuple[Point, ...]:
        return tuple(
            Point(PointKind.USE, used, None, compute_ns, allocated_bytes, peak_bytes, issue_ns=issue_ns)
            if old is None
            else Point(old.kind, used, old.key, compute_ns, allocated_bytes, peak_bytes, old.operation, issue_ns)
            for old, used, compute_ns, issue_ns, allocated_bytes, peak_bytes in zip(
                self._old, self._used, self._computed_ns, self._issued_ns, self._allocated, self._peaks, strict=True
            )
        )

    def _lifetime(self, index: int, old: Lifetime) -> Lifetime:
        first_of, place_of = self._first_of, self._place_of
        uses, read = [place_of[use] for use in old.uses], [first_of[done] for done in old.read]
        if index in self._recipe_uses:
            both = sorted([*zip(uses, read, strict=True), *self._recipe_uses[index]])
            uses, read = [use for use, _ in both], [done for _, done in both]
        end = first_of[self._ends.get(index, old.end_point)]
        return Lifetime(
            old.nbytes,
            tuple([place_of[save] for save in old.saves]),
            tuple(uses),
            tuple(read),
            place_of[old.copy_point],
            end if index in self._chosen else first_of[old.free_point],  # held to its end: it cannot be moved as well
            end,
        )

    def _lifetime_of_encoded(self, index: int) -> Lifetime:
        """The lifetime of the encoded bytes of `index`. They have no other holder and may be moved."""
        old, place = self._recording.lifetimes[index], self._encoded_at[index]
        reads = self._recipe_uses.get(self._number[index], [])
        uses, read = tuple(use for use, _ in reads), tuple(done for _, done in reads)
        end = self._first_of[self._ends.get(index, old.end_point)]
        return Lifetime(self._recomputes[index].kept_bytes, (place,), uses, read, place, place, max(place, end))
