"""Tells kinds of steps apart, predicts the kind of the next step, and remembers those that no plan serves.

A kind is a running hash of how a step begins and of the forms of its saves, so steps of other shapes are of one kind.
Steps of different kinds may begin alike, such as five of a critic and then one of the generator. So the prediction uses
the start of the step and the kinds of the steps before it: the longest sequence of kinds that was seen before. A kind
that came for the first time is expected once more, since a program that has changed usually stays as it is. The memory
is bounded; the entries used least recently are removed.

[Note: Alike kinds] A step may save a little more or less than another one of its kind: a metric that is kept, or a
statistic that is smaller than `min_bytes` at one length and not at another. A plan serves it all the same, because its
executor finds each save by its form. So a new kind that shares nearly all its bytes with an earlier one, in saves of
the same forms, is that earlier kind.

[Note: Steps without a plan] After other steps of a session had plans, one may come for which no plan meets the budget.
It has already run, and nobody knows if another one follows. So it does not end the training: the guard evicts what it
can, the log says so once, and the report counts such steps. They are recorded again if less memory is resident than in
the step without a plan.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from vdnn.errors import BudgetError, VdnnError
from vdnn.step.forms import Form
from vdnn.step.made_steps import first_save
from vdnn.step.recording import Recording, SaveKey

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
# The largest count of a kind that usually comes next. A program that changes is followed after this many steps.
_MOST_TIMES = 8


def kind_with(kind: Kind, form: Form | Begin) -> Kind:
    """The kind after one more save of a step that was of `kind` until then."""
    return hash((kind, form))


class _Next(NamedTuple):
    """The kind that came most often after a row, ahead of others by `times`."""

    kind: Kind
    times: int


class StepKinds:
    """The kinds of one session's steps."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, ...], _Next] = OrderedDict()
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        self._before: tuple[Kind, ...] = ()
        self._begin: Begin | None = None  # of the last step

    def expected(self, begin: Begin) -> Kind | None:
        """The kind expected of a step with this begin. None if no earlier step had it."""
        for row in self._rows_before(begin):
            found = self._rows.get(row)
            if len(row) == 1 and begin == self._begin and self._seen.get(self._before[-1]) == 1:
                return self._before[-1]
            if found is not None:
                return found.kind
        return None

    def ended(self, begin: Begin, kind: Kind) -> None:
        """Notes a finished step of `kind` with this begin."""
        for row in self._rows_before(begin):
            self._rows[row] = _learned(self._rows.pop(row, None), kind)
        self._seen[kind] = self._seen.pop(kind, 0) + 1
        _forget_oldest(self._rows, _MOST_ROWS)
        _forget_oldest(self._seen, _MOST_KINDS)
        self._before = (*self._before, kind)[-_LONGEST_ROW:]
        self._begin = begin

    def learn(self, steps: Iterable[tuple[Begin, Kind]]) -> None:
        """Note steps of an earlier run."""
        before, self._before = self._before, ()
        for begin, kind in steps:
            self.ended(begin, kind)
        self._before, self._begin = before, None

    def _rows_before(self, begin: Begin) -> list[tuple[int, ...]]:
        """The rows of kinds before this step, the longest first, the last one empty."""
        first, before = hash(begin), self._before
        return [(first, *before[skipped:]) for skipped in range(len(before) + 1)]


def _learned(known: _Next | None, kind: Kind) -> _Next:
    if known is None:
        return _Next(kind, 1)
    if known.kind == kind:
        return known._replace(times=min(known.times + 1, _MOST_TIMES))
    if known.times > 1:
        return _Next(known.kind, known.times - 1)
    return _Next(kind, 1)


def _forget_oldest(remembered: OrderedDict[Kind, int] | OrderedDict[tuple[int, ...], _Next], most: int) -> None:
    while len(remembered) > most:
        remembered.popitem(last=False)


# The share of its bytes that a step may save in forms that the other step does not have.
_OTHERWISE = 0.15
_MOST_COMPARED = 256
_MOST_APART = 4  # a solver may differ in each step


class _Example(NamedTuple):
    begin: Begin
    saves: dict[Form, int]  # with their bytes


class AlikeKinds:
    """The kinds of one session's steps, each with the earlier kind whose plans it shares, see [Note: Alike kinds]."""

    def __init__(self) -> None:
        self._first: OrderedDict[Kind, Kind] = OrderedDict()  # the kind that each is like, which may be itself
        self._examples: OrderedDict[Kind, _Example] = OrderedDict()
        self._apart = 0  # kinds that were set apart

    def kind_for(self, kind: Kind, begin: Begin, saves: dict[Form, int]) -> Kind:
        """The earlier kind whose plans a finished step of this kind shares, or the kind itself."""
        known = self._first.get(kind)
        if known is not None:
            return known
        found = next((one for one, other in self._examples.items() if _is_alike(other, begin, saves)), kind)
        if found == kind:
            self._examples[kind] = _Example(begin, saves)
        self._first[kind] = found
        while len(self._first) > _MOST_COMPARED:
            self._examples.pop(self._first.popitem(last=False)[0], None)
        return found

    def add(self, kind: Kind, begin: Begin, saves: dict[Form, int]) -> None:
        """Adds a kind of an earlier run, which shares plans with no other kind."""
        self._first[kind], self._examples[kind] = kind, _Example(begin, saves)

    def set_apart(self, kind: Kind, begin: Begin, saves: dict[Form, int]) -> bool:
        """Gives this kind plans of its own from now on, because its steps exceed their budgets under those that it
        shared. Returns False if it already has its own, or if the session has set too many kinds apart."""
        if self._first.get(kind, kind) == kind or self._apart >= _MOST_APART:
            return False
        self._apart += 1
        self._first[kind], self._examples[kind] = kind, _Example(begin, saves)
        return True


def _is_alike(other: _Example, begin: Begin, saves: dict[Form, int]) -> bool:
    return other.begin == begin and _is_nearly_in(saves, other.saves) and _is_nearly_in(other.saves, saves)


def _is_nearly_in(saves: dict[Form, int], others: dict[Form, int]) -> bool:
    return sum(saves[form] for form in saves.keys() - others.keys()) <= _OTHERWISE * sum(saves.values())


logger = logging.getLogger("vdnn")

_MOST_STEPS = 256


class Unplannable:
    """The steps of one session, by their kinds and the sizes of their first saves."""

    def __init__(self) -> None:
        self._resident_bytes: dict[tuple[Kind, SaveKey], int] = {}  # that are too many

    def note(self, kind: Kind, recording: Recording, error: VdnnError) -> None:
        """Notes a step for which no plan meets the budget."""
        too_many_bytes = recording.resident_bytes
        if isinstance(error, BudgetError):
            too_many_bytes -= error.least_bytes - error.budget_bytes - 1
        step = kind, first_save(recording)
        if step not in self._resident_bytes:
            logger.warning(
                "vdnn: steps that begin with the save %s get no plan, and may exceed the budget: %s", step[1], error
            )
        self._resident_bytes[step] = too_many_bytes
        if len(self._resident_bytes) > _MOST_STEPS:
            del self._resident_bytes[next(iter(self._resident_bytes))]

    def has(self, kind: Kind, first: SaveKey | None, resident_bytes: int) -> bool:
        """True if a step of this kind with this begin exceeds its budget under every plan, with this many bytes
        resident."""
        known = None if first is None else self._resident_bytes.get((kind, first))
        return known is not None and resident_bytes >= known
