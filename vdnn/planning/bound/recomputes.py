"""What the bound knows of rebuilds: a column for each storage that can be, and by which point of the step it has been.

What is made from a storage and is rebuilt has it rebuilt by then too, and it stays: so a chain of rebuilds has all of
it there from the first use of any. By which moment each is rebuilt is a number of its own, at moments for which there
is room; where there is none the two are not rebuilt both. Of steps with too many moments only those are looked at that
are the first use of what is made from a storage.
"""

from __future__ import annotations

from vdnn.planning.bound.linear_program import LinearProgram, Terms
from vdnn.planning.bound.recompute_moments import RebuildMoments

_MOST_MOMENTS = 5_000  # of all storages: twice as many take the solver five times as long


class RebuiltBy:
    """`chosen` has the column of each candidate: whether it is rebuilt at all."""

    def __init__(
        self, program: LinearProgram, moments: RebuildMoments, chosen: dict[int, int], most: int = _MOST_MOMENTS
    ) -> None:
        self._program = program
        self._moments = moments
        self.chosen = chosen
        self._is_coarse = sum(len(points) for points in moments.of.values()) > most
        self._columns: dict[int, list[tuple[int, int]]] = {}  # by candidate: points before its first use, in order
        for one, column in chosen.items():
            points = self._points(one)
            self._columns[one] = list(zip(points, program.new_columns(len(points)), strict=True))
            before: Terms = ()
            for _, by_then in self._columns[one]:
                program.require([(by_then, 1.0), *((other, -factor) for other, factor in before)], 0.0)
                program.require([(column, 1.0), (by_then, -1.0)], 0.0)
                before = [(by_then, 1.0)]
        for one in chosen:
            self._add_candidate(one)

    def by(self, candidate: int, point: int) -> Terms:
        """Whether it has been rebuilt when the point is left, or less: one column, or none."""
        if self._moments.first_use(candidate) <= point:
            return [(self.chosen[candidate], 1.0)]
        return [(column, 1.0) for moment, column in self._columns[candidate] if moment <= point][-1:]

    def _points(self, candidate: int) -> list[int]:
        own, of = self._moments.first_use(candidate), self._moments.of[candidate]
        if not self._is_coarse:
            return [moment for moment in of if moment < own]
        used = {self._moments.first_use(reader) for reader in self._readers(candidate)}
        return sorted(point for point in used if of and of[0] <= point < own)

    def _readers(self, candidate: int) -> list[int]:
        return self._moments.made_from.get(candidate, [])

    def _at_most(self, candidate: int, point: int) -> Terms:
        """Whether it has been rebuilt when the point is left, or more."""
        if not self._is_coarse:
            return self.by(candidate, point)
        of = self._moments.of[candidate]
        return [(self.chosen[candidate], 1.0)] if of and of[0] <= point else []

    def _add_candidate(self, candidate: int) -> None:
        require, chosen, own = self._program.require, self.chosen[candidate], self._moments.first_use(candidate)
        readers, is_its_own = self._readers(candidate), own in self._moments.of[candidate]
        for point, column in self._columns[candidate]:  # before its first use only for another
            require([(column, -1.0), *(term for reader in readers for term in self._at_most(reader, point))], 0.0)
        for reader in readers:
            for point in self._events(reader):
                if point < own:
                    needed = [(other, -factor) for other, factor in self.by(reader, point)]
                    require([*self.by(candidate, point), *needed, (chosen, -1.0)], -1.0)
        if is_its_own or own > self._moments.last_point:
            return
        # There is no room for it at its first use: it is rebuilt before that, or not at all.
        earlier = [term for reader in readers for term in self._at_most(reader, own - 1)]
        require([*(earlier if self._is_coarse else self.by(candidate, own - 1)), (chosen, -1.0)], 0.0)

    def _events(self, reader: int) -> set[int]:
        """Points at which more may be known of it than before."""
        return {self._moments.first_use(reader), *(() if self._is_coarse else self._moments.of[reader])}
