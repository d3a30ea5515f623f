"""The readable form of csrc/planning/local_search.h: finds the choice of gaps with the shortest step.

A choice says which gaps may be used, and which intervals need more room than the budget leaves, so that reloads can be
issued earlier. The native core schedules it. Few changes can shorten a stall: keep the storage that was waited for,
keep one whose copy came just before, or make room for an earlier reload. All are tried and the best is taken, until
none helps; then the search begins again from a disturbed choice. Effort is counted in evaluations, so the same input
gives the same plan on any machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.planning.reference.covers import order_near
from vdnn import _C
from vdnn.planning.gaps import Gap
from vdnn.planning.search.step_model import AbsenceTuple

# Only the longest stalls of a choice are tried.
_STALLS = 6
# The search ends after this many disturbed choices in a row that were all seen before: there are few choices.
_MOST_STALE = 60
# The search descends from the best of its starts only.
_DESCENTS = 4
# So many of the smallest used gaps are left out, one after another, in one round of a step that the host bounds.
_SMALLEST = 12
# So many of the unused gaps are tried in one round.
_LET_IN = 12


@dataclass(frozen=True, slots=True)
class Choice:
    """The gaps that may be used, and how they are scheduled.

    `may_leave` has a byte for each gap. `more_room` has intervals, in order, and the bytes of extra room in each.
    `in_order`: no reload before one that is needed earlier. `furthest_first`: release the storage whose next use is
    furthest away first, instead of the one whose copy is complete first.
    """

    may_leave: bytes
    more_room: tuple[tuple[int, int], ...] = ()
    in_order: bool = False
    furthest_first: bool = False

    def toggled(self, gap: int) -> Choice:
        flags = bytearray(self.may_leave)
        flags[gap] ^= 1
        return Choice(bytes(flags), self.more_room, self.in_order, self.furthest_first)

    def with_room(self, interval: int, nbytes: int) -> Choice:
        room = dict(self.more_room)
        room[interval] = room.get(interval, 0) + nbytes
        return Choice(self.may_leave, tuple(sorted(room.items())), self.in_order, self.furthest_first)

    def without_room(self, interval: int) -> Choice:
        return replace(self, more_room=tuple(one for one in self.more_room if one[0] != interval))

    def in_other_orders(self) -> Iterator[Choice]:
        yield replace(self, in_order=not self.in_order)
        yield replace(self, furthest_first=not self.furthest_first)


@dataclass(frozen=True, slots=True)
class Found:
    """A choice and the step that the native core schedules for it."""

    choice: Choice
    outcome: _C.StepOutcome

    @property
    def step_ns(self) -> int:
        return self.outcome.step_ns


@dataclass(slots=True)
class Search:
    """A search under one budget. `effort`: how many choices may be evaluated. `evaluated`: how many were."""

    model: _C.StepModel
    gaps: Sequence[Gap]
    budget_bytes: int
    kept_ns: int  # no step is shorter, so the search ends when it reaches this
    effort: int
    best: Found | None = None
    evaluated: int = 0
    _seen: set[Choice] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.evaluated >= self.effort or (self.best is not None and self.best.step_ns <= self.kept_ns)

    def run(self, starts: Sequence[Choice]) -> Found | None:
        """The best choice found. None if none of the starts fits the budget."""
        found = [one for one in (self._evaluate(start) for start in starts) if one is not None]
        for start in sorted(found, key=lambda one: one.step_ns)[:_DESCENTS]:
            self._descend(start)
        draw = random.Random(0)
        stale = 0
        while self.best is not None and not self.is_over and stale < _MOST_STALE:
            before = self.evaluated
            disturbed = self._evaluate(self._disturbed(self.best, draw))
            if disturbed is not None:
                self._descend(disturbed)
            stale = stale + 1 if self.evaluated == before else 0
        return self.best

    def _evaluate(self, choice: Choice) -> Found | None:
        if choice in self._seen:
            return None
        self._seen.add(choice)
        self.evaluated += 1
        room = list(choice.more_room)
        orders = choice.in_order, choice.furthest_first
        outcome = self.model.evaluate(choice.may_leave, self.budget_bytes, room, *orders)
        if outcome is None:
            return None
        found = Found(choice, outcome)
        if self.best is None or found.step_ns < self.best.step_ns:
            self.best = found
        return found

    def _descend(self, found: Found) -> None:
        while not self.is_over:
            better: Found | None = None
            for choice in self._neighbours(found):
                if self.is_over:
                    break
                other = self._evaluate(choice)
                if other is not None and other.step_ns < (better or found).step_ns:
                    better = other
            if better is None:
                return
            found = better

    def _neighbours(self, found: Found) -> Iterator[Choice]:
        choice = found.choice
        reload_points = {gap: reload for gap, _, reload in found.outcome.absences}
        stalls = sorted(found.outcome.stalls, key=lambda stall: -stall[2])[:_STALLS]
        for gap, is_reload, _, before in stalls:
            if gap >= 0:
                yield choice.toggled(gap)
            for earlier in before:
                if choice.may_leave[earlier]:
                    yield choice.toggled(earlier)
            if gap >= 0 and is_reload:
                yield from self._with_room_for(choice, gap, reload_points.get(gap, -1))
        if found.outcome.host_ns >= found.step_ns:
            for gap in sorted(reload_points, key=lambda gap: self.gaps[gap].nbytes)[:_SMALLEST]:
                yield choice.toggled(gap)  # a copy less to issue
        yield from choice.in_other_orders()
        left_out = [gap for gap, flag in enumerate(choice.may_leave) if not flag]
        for gap in left_out[-_LET_IN:]:
            yield choice.toggled(gap)
        for interval, _ in choice.more_room:
            yield choice.without_room(interval)

    def _with_room_for(self, choice: Choice, gap: int, reload_point: int) -> Iterator[Choice]:
        """Choices with more room at the interval that kept the gap's reload from being issued earlier."""
        interval = self.gaps[gap].last if reload_point < 0 else reload_point
        nbytes = self.gaps[gap].nbytes
        yield choice.with_room(interval, nbytes)
        if nbytes > 1:
            yield choice.with_room(interval, nbytes // 2)

    def _disturbed(self, best: Found, draw: random.Random) -> Choice:
        choice = best.choice
        cover = self.model.cover(order_near(choice.may_leave, draw), self.budget_bytes)
        more_room = tuple([one for one in choice.more_room if draw.random() < 0.7])
        return Choice(cover, more_room, in_order=draw.random() < 0.5, furthest_first=draw.random() < 0.5)


def every_plan(gaps: Sequence[Gap], most: int) -> Iterator[list[AbsenceTuple]]:
    """All plans of a step, if there are at most `most` of them, and otherwise none."""
    count = 1
    for gap in gaps:
        count *= 1 + gap.last - gap.release_point  # a lower limit, so that long steps end here
        if count > most:
            return
    options = [[None, *_absences_in(number, gap)] for number, gap in enumerate(gaps)]
    if math.prod(len(one) for one in options) > most:
        return
    for chosen in itertools.product(*options):
        yield [one for one in chosen if one is not None]


def _absences_in(number: int, gap: Gap) -> Iterator[AbsenceTuple]:
    """Every absence within the gap."""
    for release in range(gap.release_point, gap.last):
        yield number, release, -1
        if gap.use is not None:
            for reload in range(max(release + 1, gap.first), gap.use):
                yield number, release, reload


def polish(
    model: _C.StepModel,
    gaps: Sequence[Gap],
    budget_bytes: int,
    found: Sequence[AbsenceTuple],
    step_ns: int,
    effort: int,
) -> tuple[list[AbsenceTuple], int]:
    """Moves single points of a plan as long as the step gets shorter and stays under the budget. Returns the absences
    and the time of the step."""
    best, best_ns = list(found), step_ns
    evaluated, improved = 0, True
    while improved and evaluated < effort:
        improved = False
        for index, absence in enumerate(list(best)):
            for other in _shifted(gaps[absence[0]], absence):
                if evaluated >= effort:
                    return best, best_ns
                trial = [*best[:index], *([] if other is None else [other]), *best[index + 1 :]]
                evaluated += 1
                if model.peak_bytes(trial) > budget_bytes:
                    continue
                trial_ns = model.replay(trial).step_ns
                if trial_ns < best_ns:
                    best, best_ns, improved = trial, trial_ns, True
                    break
            if improved:
                break
    return best, best_ns


def _shifted(gap: Gap, absence: AbsenceTuple) -> Iterator[AbsenceTuple | None]:
    """Changes of one absence: none at all, another release point, another reload point, a reload at the use."""
    number, release, reload = absence
    yield None
    reload_at = gap.last if reload < 0 else reload
    for other in (release - 1, gap.release_point, release + 1):
        if gap.release_point <= other < reload_at and other != release:
            yield number, other, reload
    for other in (reload_at - 1, reload_at + 1):
        if gap.use is not None and release < other and gap.first <= other < gap.use:
            yield number, release, other
    if reload >= 0:
        yield number, release, -1
