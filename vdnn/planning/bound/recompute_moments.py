"""The moments of a step at which a storage can be recomputed, by the memory that the recompute needs under a budget.

A storage is recomputed at its first use, or earlier, when another storage is recomputed from it. While a recompute
runs, its inputs, its result and its temporary memory are on the device, and the result stays from then on. Everything
else may be absent. A moment at which even that exceeds the budget is left out, and a storage without moments is not
recomputed in any plan. The encoded bytes of codecs, and the memory that several recomputes need together, are not
counted, which can only add moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap
from vdnn.planning.recomputing import candidates_of
from vdnn.step.plan import Absence
from vdnn.step.recording import Recompute, Recording


class RecomputeMoments:
    """`of`: the moments of each candidate, as points of the recording in order. `made_from`: by lifetime, the
    candidates that are recomputed from it."""

    def __init__(self, recording: Recording, gaps: Sequence[Gap], budget_bytes: int) -> None:
        self.last_point = len(recording.points) - 1
        self._recording = recording
        lifetimes = recording.lifetimes
        self._recomputes = {
            one: recompute for one in candidates_of(recording) if (recompute := lifetimes[one].recompute) is not None
        }
        # By lifetime: the intervals in which it may be absent (offloaded, or discarded and not yet recomputed), and the
        # points at which it may be absent while another storage is recomputed there.
        self._absent_in: dict[int, set[int]] = {}
        self._absent_at: dict[int, set[int]] = {}
        for gap in gaps:
            self._may_be_absent(gap.lifetime, range(gap.first, gap.last + 1), gap.release_point + 1)
        for one, recompute in self._recomputes.items():
            self._may_be_absent(one, absent_intervals(lifetimes[one], Absence(recompute.known_point)), 0)
        self._room_in = [budget_bytes - point.peak_bytes for point in recording.points]
        self._room_at = [budget_bytes - point.allocated_bytes for point in recording.points]
        for room, absent in ((self._room_in, self._absent_in), (self._room_at, self._absent_at)):
            for index, points in absent.items():
                for point in points:
                    room[point] += lifetimes[index].nbytes
        self.made_from = self._made_from()
        self.of: dict[int, tuple[int, ...]] = {}
        for one in self._recomputes:
            self._find_moments(one)

    def recompute_of(self, candidate: int) -> Recompute:
        return self._recomputes[candidate]

    def first_use(self, candidate: int) -> int:
        """A point after the step if there is no use: the candidate is then recomputed for others only."""
        uses = self._recording.lifetimes[candidate].uses
        return uses[0] if uses else self.last_point + 1

    def _may_be_absent(self, index: int, intervals: Iterable[int], first_point: int) -> None:
        """Marks the intervals, and the point before each: other holders have released the storage when the recomputes
        of the interval begin."""
        found = set(intervals)
        self._absent_in.setdefault(index, set()).update(found)
        points = found | {interval - 1 for interval in found}
        self._absent_at.setdefault(index, set()).update(point for point in points if point >= first_point)

    def _made_from(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for reader, recompute in self._recomputes.items():
            for source in dict.fromkeys(recompute.inputs):
                found.setdefault(source, []).append(reader)
        return found

    def _find_moments(self, candidate: int) -> None:
        """Finds the moments of its readers first, without recursion: a chain may be as long as the network is deep."""
        waiting = [candidate]
        while waiting:
            one = waiting[-1]
            missing = [reader for reader in self.made_from.get(one, ()) if reader not in self.of]
            waiting += missing
            if missing:
                continue
            waiting.pop()
            own = self.first_use(one)
            found = {moment for reader in self.made_from.get(one, ()) for moment in self.of[reader] if moment < own}
            if own <= self.last_point:
                found.add(own)
            self.of[one] = tuple(sorted(moment for moment in found if self._has_room(one, moment)))

    def _has_room(self, candidate: int, moment: int) -> bool:
        lifetimes, recompute = self._recording.lifetimes, self.recompute_of(candidate)
        needed = {candidate, *recompute.inputs}
        held_bytes = sum(lifetimes[one].nbytes for one in needed if moment in self._absent_at.get(one, ()))
        if self._room_at[moment] - held_bytes < recompute.extra_bytes - lifetimes[candidate].nbytes:
            return False
        nbytes = lifetimes[candidate].nbytes
        later = range(moment + 1, min(self.first_use(candidate), self.last_point) + 1)
        return all(self._room_in[one] >= nbytes for one in later if one in self._absent_in[candidate])
