"""Scripts of sizes that no step had yet, made of those of two or more other sizes.

Texts of other lengths and batches of other sizes make steps that save and use the same things. So the scripts of such
steps have one pattern, in which every size, stride and number of bytes is a product of sizes of the first save; what
fits the scripts so far is taken. A made script is a guess that needs no proof: the gate compares every save with it,
and the Python hooks continue where one differs.

Only sizes of the first save that differ between two known scripts may differ in a made one: nothing shows how a step
depends on the others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, overload

from vdnn.runtime.steps.step_script import EventKind, ScriptEvent, StepScript, count_events
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.step.forms import is_within
from vdnn.step.plan import Plan
from vdnn.step.recording import SaveKey

Sizes = tuple[int, ...]
Values = tuple[int, ...]  # of a made script, by index
Number = Callable[[int], int]

_MOST_PATTERNS = 4  # of steps that begin alike
_MOST_SIZES = 4  # that are known of one pattern: the newest
_MOST_FAILURES = 3  # of made scripts in a row
_MOST_FACTORS = 4
_NEIGHBOURS = (-1, 1)  # the loss of the next token has one token less
_CONSTANTS = (0, 1)  # whose indices are the numbers themselves


class ScriptSizes:
    """The scripts of steps that begin alike and follow one plan, by the sizes of their first saves."""

    def __init__(self) -> None:
        self._patterns: list[_Pattern] = []  # the newest first
        self._failures = 0

    def learn(self, first: SaveKey, script: StepScript) -> None:
        """Notes the script of a step that began with `first`."""
        self._failures = max(0, self._failures - 1)
        found = next((one for one in self._patterns if one.takes(first.size, script)), None)
        if found is None:
            found = _Pattern(first.size, script)
        self._patterns = [found, *(one for one in self._patterns if one is not found)][:_MOST_PATTERNS]

    def script_for(self, first: SaveKey, plan: Plan) -> StepScript | None:
        """A script for a step that begins with `first`; None if those that are known tell of none."""
        if self._failures >= _MOST_FAILURES:
            return None
        made = (pattern.script_for(first, plan) for pattern in self._patterns)
        return next((one for one in made if one is not None), None)

    def served(self) -> None:
        """A step was served to its end with a made script."""
        self._failures = 0

    def failed(self) -> None:
        """A step differed from a made script."""
        self._failures += 1


class EventLater:
    """An event of a made script. Few steps ask for it."""

    __slots__ = ("_event", "_values")

    def __init__(self, event: ScriptEvent, values: Values) -> None:
        self._event, self._values = event, values

    def __call__(self) -> ScriptEvent:
        return _with_numbers(self._event, self._values.__getitem__)


def event_of(given: ScriptEvent | EventLater) -> ScriptEvent:
    return given() if isinstance(given, EventLater) else given


class _Pattern:
    """The events that scripts of several sizes have in common, and their numbers at the known sizes."""

    def __init__(self, size: Sizes, script: StepScript) -> None:
        self._bare = _bare_events(script)
        self._script = script  # the newest
        self._known = {size: list(_numbers_of(script.events))}
        self._compiled: _Compiled | None = None

    def takes(self, size: Sizes, script: StepScript) -> bool:
        """True if the script has this pattern. It is known from then on."""
        merged = _merged(self._bare, _bare_events(script))
        if merged is None or any(len(one) != len(size) for one in self._known):
            return False
        self._bare, self._script, self._compiled = merged, script, None
        self._known.pop(size, None)
        self._known[size] = list(_numbers_of(script.events))
        if len(self._known) > _MOST_SIZES:
            del self._known[next(iter(self._known))]
        return True

    def script_for(self, first: SaveKey, plan: Plan) -> StepScript | None:
        if len(self._known) < 2 or any(event.encoded for event in self._bare):
            return None
        if self._compiled is None:
            self._compiled = _Compiled(self._script, self._bare, self._known)
        return self._compiled.script_for(first, plan)


class _Compiled:
    """A pattern with an index in place of each number, and the product that gives the number of each index."""

    def __init__(self, script: StepScript, bare: Sequence[ScriptEvent], known: dict[Sizes, list[int]]) -> None:
        self.script = script
        rows = list(zip(*known.values(), strict=True))
        indices: dict[tuple[int, ...], int] = {(one,) * len(known): one for one in _CONSTANTS}
        of_rows = iter([indices.setdefault(row, len(indices)) for row in rows])
        numbered = [_with_numbers(event, lambda _: next(of_rows)) for event in script.events]
        modules = [event.module for event in bare]
        self.events = tuple(one._replace(module=module) for one, module in zip(numbered, modules, strict=True))
        self._varied = [len(set(sizes)) > 1 for sizes in zip(*known, strict=True)]
        self._known = next(reversed(known))
        self._products = [_product_of(row, list(known), self._varied) for row in indices]
        self._largest = [max(row) for row in indices]
        self._exempt = {event.nbytes for event in self.events if event.kind is EventKind.EXEMPT}
        self._planned = {event.planned: event.storage_bytes for event in self.events if event.is_new}
        self.native = script.native_of(self.events)
        self.keys = [event.key for event in self.events if event.key is not None]
        self.saves = {event.form: event.nbytes for event in self.events if event.form is not None}
        self._counted, self._saved_bytes, self._kept_bytes = _counted(bare, self.events)

    def script_for(self, first: SaveKey, plan: Plan) -> StepScript | None:
        known = zip(first.size, self._known, self._varied, strict=True)
        if len(first.size) != len(self._known) or any(new != old and not varied for new, old, varied in known):
            return None
        values = [None if product is None else product.at(first.size) for product in self._products]
        whole = tuple(value for value in values if value is not None and value >= 0)
        if len(whole) < len(values) or not self._is_planned(whole, first, plan):
            return None
        begin = _resized_key(self.keys[0], whole.__getitem__)
        return _MadeScript(self, whole) if begin == first else None

    def _is_planned(self, values: Values, first: SaveKey, plan: Plan) -> bool:
        """True if no storage is larger than planned, and no save that was too small to be managed may be large enough
        here. The plan's own step had those saves too, so they are too small wherever no dimension is larger than its.
        Elsewhere they must not be larger than they were in the known scripts."""
        begin = next(point.key for point in plan.points if point.key is not None)
        if not is_within(first, begin) and any(values[index] > self._largest[index] for index in self._exempt):
            return False
        return all(
            planned is not None and values[index] <= plan.lifetimes[planned].nbytes
            for planned, index in self._planned.items()
        )

    def counted(self, values: Values) -> Counters:
        """The counts that the hooks would make in a step of these sizes."""
        counters = Counters()
        counters.add(self._counted)
        counters.saved_bytes = sum(values[index] * times for index, times in self._saved_bytes.items())
        for (reason, index), times in self._kept_bytes.items():
            counters.kept_bytes[reason] += values[index] * times
        return counters


class _MadeScript(StepScript):
    """A script of a size that no step had."""

    def __init__(self, pattern: _Compiled, values: Values) -> None:
        self.__dict__.update(pattern.script.__dict__)
        self._pattern, self._values = pattern, values
        self._more_bytes = self._whole = None
        self.proven = {}
        self.saves = {form: values[index] for form, index in pattern.saves.items()}
        self.save_key = _resized_key(pattern.keys[-1], values.__getitem__)
        self.events = _MadeEvents(pattern.events, values)
        later = [None if event.moving is None else EventLater(event, values) for event in pattern.events]
        self.native = pattern.native.resized(values, later)

    def _count_whole(self) -> Counters:
        return self._pattern.counted(self._values)


class _MadeEvents(Sequence[ScriptEvent]):
    """The events of a made script, each made when it is asked for."""

    def __init__(self, pattern: Sequence[ScriptEvent], values: Values) -> None:
        self._pattern, self._values = pattern, values
        self._made: dict[int, ScriptEvent] = {}

    def __len__(self) -> int:
        return len(self._pattern)

    @overload
    def __getitem__(self, index: int) -> ScriptEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScriptEvent]: ...
    def __getitem__(self, index: int | slice) -> ScriptEvent | list[ScriptEvent]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        known = self._made.get(index)
        if known is None:
            known = self._made[index] = _with_numbers(self._pattern[index], self._values.__getitem__)
        return known


# The numbers of a script.


def _with_numbers(event: ScriptEvent, number: Number) -> ScriptEvent:
    """The event with `number` of each of its numbers in their place."""
    if not event.is_save:
        return event
    nbytes, storage_bytes = number(event.nbytes), number(event.storage_bytes)
    key = None if event.key is None else _resized_key(event.key, number)
    moving = event.moving
    if moving is not None:
        moving = moving._replace(elements=number(moving.elements))
    return event._replace(nbytes=nbytes, storage_bytes=storage_bytes, key=key, moving=moving)


def _resized_key(key: SaveKey, number: Number) -> SaveKey:
    size, stride = tuple(map(number, key.size)), tuple(map(number, key.stride))
    return SaveKey(key.producer, key.module, key.dtype, size, stride, key.occurrence)


def _numbers_of(events: Sequence[ScriptEvent]) -> Iterator[int]:
    """All numbers, in the order of _with_numbers."""
    for event in events:
        if event.is_save:
            yield event.nbytes
            yield event.storage_bytes
            if event.key is not None:
                yield from event.key.size
                yield from event.key.stride
            if event.moving is not None:
                yield event.moving.elements


def _bare_events(script: StepScript) -> list[ScriptEvent]:
    """The events without numbers."""
    events = []
    for one in script.events:
        event = _with_numbers(one, lambda _: 0)
        events.append(event if event.key is None else event._replace(key=replace(event.key, occurrence=0)))
    return events


def _merged(one: list[ScriptEvent], other: list[ScriptEvent]) -> list[ScriptEvent] | None:
    """The bare events of two scripts, if they are the same. Each may have made some of its modules anew."""
    if len(one) != len(other):
        return None
    merged = []
    for mine, its in zip(one, other, strict=True):
        if mine != its:
            mine, its = mine.in_any_module(), its.in_any_module()
            if mine != its:
                return None
        merged.append(mine)
    return merged


def _counted(
    bare: Sequence[ScriptEvent], events: Sequence[ScriptEvent]
) -> tuple[Counters, Counter[int], Counter[tuple[Kept, int]]]:
    """The counts of a step without bytes; and the indices of the bytes that it saves and keeps, with their number."""
    counted = Counters()
    count_events(bare, counted)
    counted.kept_bytes.clear()
    saved, kept = Counter[int](), Counter[tuple[Kept, int]]()
    for event in events:
        if event.is_save:
            saved[event.nbytes] += 1
        if event.kind is EventKind.EXEMPT and event.reason is not None:
            kept[event.reason, event.nbytes] += 1
        elif event.kind is EventKind.KEPT and event.is_new and event.reason is not None:
            kept[event.reason, event.storage_bytes] += 1
    return counted, saved, kept


# What a number is made of.


class _Product(NamedTuple):
    """`multiple` / `divisor` times a product of sizes, each with something added."""

    multiple: int
    divisor: int
    factors: tuple[tuple[int, int], ...]  # the dimension, and the number that is added to its size

    def at(self, sizes: Sizes) -> int | None:
        """The number for these sizes of the first save; None if it is not whole."""
        number = self.multiple * _times(sizes, self.factors)
        return None if number % self.divisor else number // self.divisor


def _times(sizes: Sizes, factors: Sequence[tuple[int, int]]) -> int:
    return math.prod(sizes[dimension] + more for dimension, more in factors)


def _product_of(row: Sequence[int], sizes: Sequence[Sizes], varied: Sequence[bool]) -> _Product | None:
    """The simplest product that gives this number for each of these sizes."""
    if len(set(row)) == 1:
        return _Product(row[0], 1, ())
    if not all(row):
        return None
    dimensions = [dimension for dimension, is_varied in enumerate(varied) if is_varied]
    for added in ((0,), (0, *_NEIGHBOURS)):
        factors = list(itertools.product(dimensions, added))
        for count in range(1, _MOST_FACTORS + 1):
            for chosen in itertools.combinations_with_replacement(factors, count):
                made = [_times(one, chosen) for one in sizes]
                if all(made) and all(number * made[0] == row[0] * one for number, one in zip(row, made, strict=True)):
                    common = math.gcd(row[0], made[0])
                    return _Product(row[0] // common, made[0] // common, chosen)
    return None
