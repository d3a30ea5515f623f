"""Remembers the kinds of a session's steps, and predicts the kind of the next step.

A kind is a running hash of how a step begins and of the forms of its saves, so steps of other shapes are of one kind.
Steps of different kinds may begin alike, such as five of a critic and then one of the generator. So the prediction uses
the begin of the step and the kinds of the steps before it: the longest row of them that was seen before. The memory is
bounded; the entries used least recently are removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from vdnn.step.forms import Form

Kind = int

NO_SAVES: Kind = 0


class Begin(NamedTuple):
    """How a step or a micro-batch begins: the form of its first save, and the model that made it (see
    ModuleWatch.model). `is_later`: it is not the first micro-batch of its step, so gradients were there before it."""

    form: Form
    model: int
    is_later: bool = False

    def is_like(self, other: Begin) -> bool:
        """True if the two differ in `is_later` at most."""
        return self._replace(is_later=other.is_later) == other


_LONGEST_ROW = 12
_MOST_ROWS = 512
_MOST_KINDS = 256
# The largest count of what usually comes next. A program that changes is followed after this many steps.
_MOST_TIMES = 8
# A kind counts as likely after this many steps of it, if what comes next is not always the same.
_OFTEN = 3


def kind_with(kind: Kind, form: Form | Begin) -> Kind:
    """The kind of a step that was of `kind` so far, after one more save."""
    return hash((kind, form))


class Expected(NamedTuple):
    """A predicted kind. `is_likely`: it came each time after these steps, or it is frequent."""

    kind: Kind
    is_likely: bool


class _Next(NamedTuple):
    """The kind that came most often after a row, ahead of others by `times`. `is_sure`: no other kind came."""

    kind: Kind
    times: int
    is_sure: bool


class StepKinds:
    """The kinds of one session's steps."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, ...], _Next] = OrderedDict()
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        self._before: tuple[Kind, ...] = ()

    def expected(self, begin: Begin) -> Expected | None:
        """The kind expected of the step that begins so; None if no earlier step did."""
        for row in self._rows_before(begin):
            found = self._rows.get(row)
            if found is not None:
                is_certain = found.is_sure and len(row) > 1
                return Expected(found.kind, is_certain or self._seen.get(found.kind, 0) >= _OFTEN)
        return None

    def ended(self, begin: Begin, kind: Kind) -> None:
        """Note a finished step that began so and was of `kind`."""
        for row in self._rows_before(begin):
            self._rows[row] = _learned(self._rows.pop(row, None), kind)
        self._seen[kind] = self._seen.pop(kind, 0) + 1
        _forget_oldest(self._rows, _MOST_ROWS)
        _forget_oldest(self._seen, _MOST_KINDS)
        self._before = (*self._before, kind)[-_LONGEST_ROW:]

    def learn(self, steps: Iterable[tuple[Begin, Kind]]) -> None:
        """Note steps of an earlier run."""
        before, self._before = self._before, ()
        for begin, kind in steps:
            self.ended(begin, kind)
        self._before = before

    def _rows_before(self, begin: Begin) -> list[tuple[int, ...]]:
        """The rows of kinds before this step, the longest first, the last one empty."""
        first, before = hash(begin), self._before
        return [(first, *before[skipped:]) for skipped in range(len(before) + 1)]


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
