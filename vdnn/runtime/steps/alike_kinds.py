"""Takes kinds of steps that differ in little for one kind.

A step may save a little more or less than another one of its kind: a metric that is kept, or a statistic that is
smaller than `min_bytes` at one length and not at another. A plan serves it all the same, because its executor finds
each save by its form. So a new kind that shares nearly all its bytes with an earlier one, in saves of the same forms,
is that earlier kind.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from vdnn.runtime.steps.kinds import Begin, Kind
from vdnn.step.forms import Form

# The share of its bytes that a step may save in forms that the other one has not.
_OTHERWISE = 0.15
_MOST_KINDS = 256
_MOST_APART = 4  # a solver may differ in each step


class _Example(NamedTuple):
    begin: Begin
    saves: dict[Form, int]  # with their bytes


class AlikeKinds:
    """The kinds of one session's steps, and for each the earlier one that it is like."""

    def __init__(self) -> None:
        self._first: OrderedDict[Kind, Kind] = OrderedDict()  # the kind that each is like, which may be itself
        self._examples: OrderedDict[Kind, _Example] = OrderedDict()
        self._apart = 0  # kinds that were set apart

    def kind_for(self, kind: Kind, begin: Begin, saves: dict[Form, int]) -> Kind:
        """The earlier kind that a finished step of this kind is like; the kind itself if there is none."""
        known = self._first.get(kind)
        if known is not None:
            return known
        found = next((one for one, other in self._examples.items() if _is_alike(other, begin, saves)), kind)
        if found == kind:
            self._examples[kind] = _Example(begin, saves)
        self._first[kind] = found
        while len(self._first) > _MOST_KINDS:
            self._examples.pop(self._first.popitem(last=False)[0], None)
        return found

    def add(self, kind: Kind, begin: Begin, saves: dict[Form, int]) -> None:
        """A kind of an earlier run, which is like no other one."""
        self._first[kind], self._examples[kind] = kind, _Example(begin, saves)

    def set_apart(self, kind: Kind, begin: Begin, saves: dict[Form, int]) -> bool:
        """Steps of this kind exceed their budgets under the plans of the kind that it is like: from now on it is one of
        its own. False if it is one already, or if there are too many."""
        if self._first.get(kind, kind) == kind or self._apart >= _MOST_APART:
            return False
        self._apart += 1
        self._first[kind], self._examples[kind] = kind, _Example(begin, saves)
        return True


def _is_alike(other: _Example, begin: Begin, saves: dict[Form, int]) -> bool:
    return other.begin == begin and _is_nearly_in(saves, other.saves) and _is_nearly_in(other.saves, saves)


def _is_nearly_in(saves: dict[Form, int], others: dict[Form, int]) -> bool:
    return sum(saves[form] for form in saves.keys() - others.keys()) <= _OTHERWISE * sum(saves.values())
