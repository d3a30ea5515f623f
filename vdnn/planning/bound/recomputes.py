"""The bound's columns for recomputes: by which point of the step each candidate has been recomputed.

If a storage and its input are both recomputed, the input is recomputed by then too, and it stays: so a whole chain of
recomputes is on the device from the first use of any of them. Each candidate has a column for every moment at which
there is room for its recompute; without such a moment, the two are not both recomputed. In steps with too many moments,
only the first uses of a storage's readers are considered.
"""

from __future__ import annotations

from vdnn.planning.bound.linear_program import LinearProgram, Terms
from vdnn.planning.bound.recompute_moments import RecomputeMoments

_MOST_MOMENTS = 5_000  # of all storages together: twice as many take the solver five times as long


class RecomputedBy:
    """`chosen`: by candidate, the column that says whether it is recomputed at all."""

    def __init__(
        self, program: LinearProgram, moments: RecomputeMoments, chosen: dict[int, int], most: int = _MOST_MOMENTS
    ) -> None:
        self._program = program
        self._moments = moments
        self.chosen = chosen
        self._is_coarse = sum(len(points) for points in moments.of.values()) > most
        self._columns: dict[int, list[tuple[int, int]]] = {}  # by candidate: points before its first use, with columns
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
        """A lower limit for "recomputed when the point is left": one column, or none for 0."""
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
        """An upper limit for "recomputed when the point is left": one column, or none for 0."""
        if not self._is_coarse:
            return self.by(candidate, point)
        of = self._moments.of[candidate]
        return [(self.chosen[candidate], 1.0)] if of and of[0] <= point else []

    def _add_candidate(self, candidate: int) -> None:
        require, chosen, own = self._program.require, self.chosen[candidate], self._moments.first_use(candidate)
        readers, is_its_own = self._readers(candidate), own in self._moments.of[candidate]
        for point, column in self._columns[candidate]:  # before its first use, only for a reader
            require([(column, -1.0), *(term for reader in readers for term in self._at_most(reader, point))], 0.0)
        for reader in readers:
            for point in self.events(reader):
                if point < own:
                    needed = [(other, -factor) for other, factor in self.by(reader, point)]
                    require([*self.by(candidate, point), *needed, (chosen, -1.0)], -1.0)
        if is_its_own or own > self._moments.last_point:
            return
        # There is no room for its recompute at its first use: it is recomputed before that, or not at all.
        earlier = [term for reader in readers for term in self._at_most(reader, own - 1)]
        require([*(earlier if self._is_coarse else self.by(candidate, own - 1)), (chosen, -1.0)], 0.0)

    def events(self, reader: int) -> set[int]:
        """The points at which the limits of by() may change."""
        return {self._moments.first_use(reader), *(() if self._is_coarse else self._moments.of[reader])}
