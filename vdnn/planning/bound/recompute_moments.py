"""When in a step a storage can be rebuilt, by the memory that this takes under a budget.

A storage is rebuilt at its first use, or earlier: at the moment at which another is that is made from it. While that
runs, what it reads is there, and its result, and what it needs in between; from then on it stays. All else may be away
at best. Where even so the budget is not met the moment is none of its own; a storage without any is not rebuilt in any
plan. What this leaves out (what codecs leave, what several rebuilds need together) only makes for more moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap
from vdnn.planning.recomputing import candidates_of
from vdnn.step.plan import Absence
from vdnn.step.recording import Rebuild, Recording


class RebuildMoments:
    """`of` each candidate its moments, as points of the recording in order; and the candidates `made_from` each of the
    lifetimes that some are made from."""

    def __init__(self, recording: Recording, gaps: Sequence[Gap], budget_bytes: int) -> None:
        self.last_point = len(recording.points) - 1
        self._recording = recording
        self._candidates = candidates_of(recording)
        # By lifetime: intervals in which it may be away, moved or to be rebuilt; and points at which it may be when
        # something is rebuilt there.
        self._away_in: dict[int, set[int]] = {}
        self._away_at: dict[int, set[int]] = {}
        for gap in gaps:
            self._may_be_away(gap.lifetime, range(gap.first, gap.last + 1), gap.release_point + 1)
        for one in self._candidates:
            intervals = absent_intervals(recording.lifetimes[one], Absence(self.rebuild_of(one).known_point))
            self._may_be_away(one, intervals, 0)
        self._room_in = [budget_bytes - point.peak_bytes for point in recording.points]
        self._room_at = [budget_bytes - point.allocated_bytes for point in recording.points]
        for room, away in ((self._room_in, self._away_in), (self._room_at, self._away_at)):
            for index, places in away.items():
                for place in places:
                    room[place] += recording.lifetimes[index].nbytes
        self.made_from = self._made_from()
        self.of: dict[int, tuple[int, ...]] = {}
        for one in self._candidates:
            self._find(one)

    def rebuild_of(self, candidate: int) -> Rebuild:
        rebuild = self._recording.lifetimes[candidate].rebuild
        assert rebuild is not None, "a candidate"
        return rebuild

    def first_use(self, candidate: int) -> int:
        """Behind the step if there is none: then it is rebuilt for others only."""
        uses = self._recording.lifetimes[candidate].uses
        return uses[0] if uses else self.last_point + 1

    def _may_be_away(self, index: int, intervals: Iterable[int], first_point: int) -> None:
        """At the point before an interval too: what others hold up to there has gone when its rebuilds begin."""
        found = set(intervals)
        self._away_in.setdefault(index, set()).update(found)
        points = found | {interval - 1 for interval in found}
        self._away_at.setdefault(index, set()).update(point for point in points if point >= first_point)

    def _made_from(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for reader in self._candidates:
            for source in dict.fromkeys(self.rebuild_of(reader).inputs):
                found.setdefault(source, []).append(reader)
        return found

    def _find(self, candidate: int) -> None:
        """Those of its readers first. A chain may be as long as the network is deep."""
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
        lifetimes, rebuild = self._recording.lifetimes, self.rebuild_of(candidate)
        there = {candidate, *rebuild.inputs}
        held_bytes = sum(lifetimes[one].nbytes for one in there if moment in self._away_at.get(one, ()))
        if self._room_at[moment] - held_bytes < rebuild.extra_bytes - lifetimes[candidate].nbytes:
            return False
        nbytes = lifetimes[candidate].nbytes
        later = range(moment + 1, min(self.first_use(candidate), self.last_point) + 1)
        return all(self._room_in[one] >= nbytes for one in later if one in self._away_in[candidate])
