"""Estimates of the memory and the least time of a placement, from the rows of the bound's program.

The search asks for thousands a second before it simulates a placement. A row says how long some windows of the cycle
last at least; the others last at least as long as they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vdnn.planning.training.placement import Activations, UnitPlacement

_USED = 0.5  # of the room for copies outside of a row's windows, that no plan can use in the mean

Row = tuple[float, Sequence[tuple[int, float]]]  # the value of the base, and what each column adds


@dataclass(frozen=True, slots=True)
class Estimate:
    """`columns[unit]` are the columns of its placements. Rows of memory are in bytes over what there is, of time in
    seconds. The least time of a step is certain; the likely one ranks placements."""

    columns: Sequence[dict[UnitPlacement, int]]
    memory_base: Any
    memory: Any
    time_base: Any
    likely_base: Any
    time: Any

    @staticmethod
    def of_rows(
        columns: Sequence[dict[UnitPlacement, int]],
        memory: Sequence[Row],
        time: Sequence[Row],
        room_s: Sequence[float],
    ) -> Estimate:
        """`room_s`: the seconds by which each row of time is shorter because of copies outside of its windows."""
        count = sum(map(len, columns))
        time_base, factors = _arrays(time, count)
        likely = time_base + [_USED * one for one in room_s]
        return Estimate(columns, *_arrays(memory, count), time_base, likely, factors)

    def of(self, units: Sequence[UnitPlacement]) -> tuple[float, float]:
        """Bytes over the budget and the host's memory, in 1e9, and the least time of a step in seconds."""
        memory, seconds = self.changes(enumerate(units))
        return max(0.0, float((self.memory_base + memory).max())), float((self.time_base + seconds).max())

    def rank(self, memory: Any, seconds: Any) -> tuple[float, float, float]:
        """Bytes over what there is, the likely and the least time, for the changes of all units together."""
        over = max(0.0, float((self.memory_base + memory).max()))
        return over, float((self.likely_base + seconds).max()), float((self.time_base + seconds).max())

    def changes(self, units: Iterable[tuple[int, UnitPlacement]]) -> tuple[Any, Any]:
        """The numbers that placements of some units, with their places, add to the rows of memory and of time."""
        chosen = []
        for index, one in units:
            columns = self.columns[index]
            chosen += [columns[part] for part in _parts(one) if part in columns]
        return self.memory[chosen].sum(axis=0), self.time[chosen].sum(axis=0)

    def of_products(
        self, homes: Sequence[Sequence[UnitPlacement]], fates: Sequence[Sequence[Activations]]
    ) -> Iterator[tuple[tuple[float, float, float], int, int]]:
        """The ranks of all pairs, with the places of both."""
        activations = [[UnitPlacement(fate) for fate in one] for one in fates]
        changes = [[self.changes(enumerate(one)) for one in ones] for ones in (homes, activations)]
        for place, (memory, seconds) in enumerate(changes[0]):
            for other, (more_memory, more_seconds) in enumerate(changes[1]):
                yield self.rank(memory + more_memory, seconds + more_seconds), place, other


def _parts(one: UnitPlacement) -> tuple[UnitPlacement, UnitPlacement]:
    known = _PARTS.get(one)
    if known is None:
        moved = UnitPlacement(Activations.KEEP, one.streams, one.gradient_leaves, one.state)
        known = _PARTS[one] = (moved, UnitPlacement(one.activations))
    return known


_PARTS: dict[UnitPlacement, tuple[UnitPlacement, UnitPlacement]] = {}


def _arrays(rows: Sequence[Row], count: int) -> tuple[Any, Any]:
    import numpy

    matrix = numpy.zeros((count, len(rows)))
    for index, (_, terms) in enumerate(rows):
        for column, value in terms:
            matrix[column, index] = value
    return numpy.array([base for base, _ in rows]), matrix
