"""Which kind each step of a session was, and of which kind the next is going to be.

A kind is a running hash of the keys of a step's saves. Steps of several kinds may begin alike, a critic's five and then
the generator's: what a step is going to be is told by its first save and by the kinds of the steps before it, by the
longest row of them that was seen before. What is remembered is bounded; what was used least recently goes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from vdnn.step.recording import SaveKey

Kind = int

NO_SAVES: Kind = 0
_LONGEST_ROW = 12
_MOST_ROWS = 512
_MOST_KINDS = 256
# How far the count of what usually comes next rises: a habit that changed is forgotten after so many steps.
_MOST_TIMES = 8
# As often a kind has to be seen for it to be expected, where what comes next is not always the same.
_OFTEN = 3


def kind_with(kind: Kind, key: SaveKey) -> Kind:
    """Of a step that was of `kind` so far, with one save more."""
    return hash((kind, key))


class Expected(NamedTuple):
    """`is_likely`: the steps before have led to it each time, or it is a frequent one."""

    kind: Kind
    is_likely: bool


class _Next(NamedTuple):
    """What came after a row: `kind`, in the majority by `times`; `is_sure`: and nothing else."""

    kind: Kind
    times: int
    is_sure: bool


class StepKinds:
    """Of one session."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, ...], _Next] = OrderedDict()
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        self._before: tuple[Kind, ...] = ()

    def expected(self, first: SaveKey) -> Expected | None:
        """Of the step that begins with this save; None if no step has begun so."""
        for row in self._rows_before(first):
            found = self._rows.get(row)
            if found is not None:
                is_certain = found.is_sure and len(row) > 1
                return Expected(found.kind, is_certain or self._seen.get(found.kind, 0) >= _OFTEN)
        return None

    def ended(self, first: SaveKey, kind: Kind) -> None:
        """A step is over that began with `first`, and was of `kind`."""
        for row in self._rows_before(first):
            self._rows[row] = _learned(self._rows.pop(row, None), kind)
        self._seen[kind] = self._seen.pop(kind, 0) + 1
        _forget_oldest(self._rows, _MOST_ROWS)
        _forget_oldest(self._seen, _MOST_KINDS)
        self._before = (*self._before, kind)[-_LONGEST_ROW:]

    def _rows_before(self, first: SaveKey) -> list[tuple[int, ...]]:
        """The longest first, down to none."""
        begin, before = hash(first), self._before
        return [(begin, *before[skipped:]) for skipped in range(len(before) + 1)]


def _learned(known: _Next | None, kind: Kind) -> _Next:
    if known is None:
        return _Next(kind, 1, is_sure=True)
    if known.kind == kind:
        return known._replace(times=min(known.times + 1, _MOST_TIMES))
    if known.times > 1:
        return _Next(known.kind, known.times - 1, is_sure=False)
    return _Next(kind, 1, is_sure=False)


def _forget_oldest(remembered: OrderedDict[Kind, int] | OrderedDict[tuple[int, ...], _Next], most: int) -> None:
    while len(remembered) > most:
        remembered.popitem(last=False)
