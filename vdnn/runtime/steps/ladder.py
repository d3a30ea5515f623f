"""The plans of one kind of step, for one size after another: a ladder, whose rungs are plans.

A plan serves every step of its kind that is no larger: at each point that step takes no more. So a step follows the
lowest rung that serves it. Where no rung is known to, it follows the highest, and a guard takes over from where the
step is larger. Sizes between and above those that were recorded get rungs that are made of two recordings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from vdnn.planning.footprint import interval_bytes, stored_bytes
from vdnn.planning.planned_step import PlannedStep
from vdnn.runtime.steps.executor import Executor, Occupancy
from vdnn.step.forms import is_within
from vdnn.step.made_steps import first_save, with_resident
from vdnn.step.plan import Action
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.resized_steps import Line, Sizes, guessed, lines_through, resized
from vdnn.step.timeline import Timeline

# A rung serves steps down to this share of its size well, and any step if it slows down by no more than `_FREE`. One
# that slows down by more than `_CHEAP` is worth recording a smaller step for.
_NEAR = 0.95
_FREE = 1.005
_CHEAP = 1.1
# A rung that is made for a step is this much larger than it, in the size that changes.
_HEADROOM = 1.02
# A step is recorded, though a rung serves it, if it is larger or smaller than these shares of all that were recorded.
_LARGER = 1.05
_MUCH_SMALLER = 0.7
# A step follows no rung that would have to be this many times as large.
_FAR = 1.5
# The most rungs, recordings, and sizes of first saves that one kind remembers.
_MOST_RUNGS = 16
_MOST_RECORDINGS = 8
_MOST_SIZES = 64


class Made(NamedTuple):
    """A step that was not recorded. `is_guess`: it is made of one only."""

    recording: Recording
    is_guess: bool


class Source(Enum):
    """What a rung was planned from."""

    RECORDED = "a recorded step"
    MADE = "steps of other sizes"
    GUESSED = "one step of another size"


class Rung:
    """A plan that vdnn made, and what it was made from."""

    def __init__(
        self,
        planned: PlannedStep,
        recording: Recording,
        timeline: Timeline | None,
        source: Source = Source.RECORDED,
    ) -> None:
        self.timeline = timeline
        self.source = source
        self.tightened_bytes = 0
        self.tightenings = 0
        self.steps = 0  # that followed it
        self.has_warned = False
        self._served: list[SaveKey] = []  # first saves of larger steps that it served
        self.follow(recording, planned)

    def follow(self, recording: Recording, planned: PlannedStep) -> None:
        """From now on its steps follow this plan. What the planner predicts of them is remembered."""
        self.recording = recording
        lifetimes = planned.plan.lifetimes
        followed = planned.followed
        occupancy = Occupancy(
            stored_bytes(followed, lifetimes),
            stored_bytes(followed, lifetimes, {Action.KEEP}),
            interval_bytes(followed, lifetimes),
        )
        self.executor = Executor(planned.plan, occupancy)
        self.slowdown = planned.slowdown
        self.peak_bytes = planned.timeline.peak_bytes

    @property
    def is_guess(self) -> bool:
        """True if a recorded step may get a better plan. A guess that costs nothing stays."""
        return self.source is Source.GUESSED and self.slowdown > _FREE

    @property
    def first(self) -> SaveKey:
        return self.executor.saves[0].key

    @property
    def nbytes(self) -> int:
        return self.recording.managed_bytes

    def serves(self, first: SaveKey) -> bool:
        """True if a step that begins so is known to be no larger."""
        return is_within(first, self.first) or any(is_within(first, one) for one in self._served)

    def is_far_above(self, first: SaveKey) -> bool:
        """True if a step that begins so may have a better plan."""
        return self.slowdown > _FREE and math.prod(first.size) < _NEAR * math.prod(self.first.size)

    def served(self, first: SaveKey) -> None:
        """A step that begins so followed it, and was no larger."""
        if not self.serves(first):
            larger = [one for one in self._served if not is_within(one, first)]
            self._served = [*larger, first][-_MOST_SIZES:]


class Ladder:
    """The rungs of one kind, the lowest first."""

    def __init__(self) -> None:
        self.rungs: list[Rung] = []
        self.last_used = 0
        self.records_all = False  # the first save does not tell the size of a step: those that follow are recorded
        self._recordings: dict[Sizes, Recording] = {}
        self._have_own_recomputes: set[Sizes] = set()
        self._has_tried: set[Sizes] = set()  # sizes that no rung could be made for, from these recordings

    def choose(self, first: SaveKey) -> Rung | None:
        """The rung that is known to serve a step that begins with this save."""
        rungs = reversed(self.rungs) if self.records_all else self.rungs
        return next((rung for rung in rungs if rung.serves(first)), None)

    def is_far_below(self, first: SaveKey) -> bool:
        """True if a step that begins so outgrows every rung, so that following one is worse than none."""
        return math.prod(first.size) > _FAR * math.prod(self.rungs[-1].first.size)

    def deserves_own(self, rung: Rung, first: SaveKey) -> bool:
        """True if the plan of this rung is so slow that a step far below it gets one of its own."""
        return rung.slowdown > _CHEAP and rung.is_far_above(first) and len(self.rungs) < _MOST_RUNGS

    # What was recorded.

    def note(self, recording: Recording, *, has_own_recomputes: bool) -> None:
        """Remembers a recorded step, for those that are made of it."""
        size = first_save(recording).size
        if has_own_recomputes:
            self._have_own_recomputes.add(size)
        known = self._recordings.get(size)
        if known is not None and known.managed_bytes >= recording.managed_bytes:
            return
        self._recordings[size] = recording
        self._has_tried.clear()
        if len(self._recordings) > _MOST_RECORDINGS:  # the smallest and the largest tell most
            by_size = sorted(self._recordings, key=math.prod)
            del self._recordings[by_size[len(by_size) // 2]]

    @property
    def recorded_ends(self) -> tuple[Recording, Recording] | None:
        """The smallest and the largest recorded step; None if first saves do not tell the sizes of steps."""
        if self.records_all or len(self._recordings) < 2:
            return None
        by_size = sorted(self._recordings, key=math.prod)
        return self._recordings[by_size[0]], self._recordings[by_size[-1]]

    def learns_from(self, first: SaveKey) -> bool:
        """True if a recording of a step that begins so tells more about other sizes."""
        if first.size in self._recordings:
            return False
        elements, known = math.prod(first.size), list(map(math.prod, self._recordings))
        return len(known) < 2 or elements > _LARGER * max(known) or elements < _MUCH_SMALLER * min(known)

    def foretold(self, first: SaveKey) -> Recording:
        """What the recorded steps tell of one that begins with this save: at worst a guess."""
        lines = lines_through(first.size, self._recordings)
        found = (resized(line, first, 0) for line in lines)
        return next((one for one in found if one is not None), None) or self._guessed(first)

    def _guessed(self, first: SaveKey, others: Sequence[Ladder] = ()) -> Recording:
        """From recordings with recomputes of their own, if there are any: the error of a guess grows with the next."""
        ladders = (self, *others)
        own = [one._recordings[size] for one in ladders for size in one._have_own_recomputes & one._recordings.keys()]
        recordings = own or list(self._recordings.values()) or [self.rungs[-1].recording]
        return guessed(min(recordings, key=lambda one: _ratio(first_save(one), first)), first)

    def made_for(self, first: SaveKey, fits: Callable[[Recording], bool], others: Sequence[Ladder]) -> Iterator[Made]:
        """Steps made of recorded ones that are as large as one that begins with this save, the best one first. `fits`:
        a step that fits the budget with everything kept is made as large as it can be and still fit. `others` have
        nearly the same steps: they are asked if this ladder could only guess."""
        if first.size in self._has_tried:
            return
        self._has_tried.add(first.size)
        lines = lines_through(first.size, self._recordings)
        is_guess = not lines
        if is_guess:
            lines = [line for one in others for line in lines_through(first.size, one._recordings)]
        for line in lines:
            resident_bytes = max(one.resident_bytes for one in line.recorded.values())
            alike = {position: with_resident(one, resident_bytes) for position, one in line.recorded.items()}
            for recording in _made(line._replace(recorded=alike), first, fits):
                yield Made(recording, is_guess)
        if not lines:
            yield Made(self._guessed(first, others), is_guess)

    # Rungs.

    def find_near(self, first: SaveKey, recording: Recording) -> bool:
        """True if a rung serves a recorded step well, so that it needs none of its own."""
        nbytes = recording.managed_bytes
        return any(rung.serves(first) and _NEAR * rung.nbytes <= nbytes <= rung.nbytes for rung in self.rungs)

    def drop(self, rung: Rung) -> None:
        """Removes a rung that was made of what turned out to be wrong, and all that are guessed."""
        self.rungs = [one for one in self.rungs if one is not rung and one.source is not Source.GUESSED]

    def add(self, rung: Rung) -> None:
        """Adds a rung. Of rungs that begin alike the highest remains: the begin of a step cannot tell them apart."""
        alike = [one for one in self.rungs if one.first.size == rung.first.size]
        if any(one.nbytes > rung.nbytes for one in alike):
            return
        self.rungs = sorted([*(one for one in self.rungs if one not in alike), rung], key=lambda one: one.nbytes)
        if len(self.rungs) > _MOST_RUNGS:
            self.rungs.remove(min(self.rungs[:-1], key=lambda one: one.steps))


def _ratio(one: SaveKey, other: SaveKey) -> float:
    """How many times as large one of the two is."""
    sizes = math.prod(one.size), math.prod(other.size)
    return max(sizes) / max(1, min(sizes))


def _made(line: Line, first: SaveKey, fits: Callable[[Recording], bool]) -> Iterator[Recording]:
    """Steps from the wanted size on: the largest that fits; or one a little larger, and one exactly so."""

    def at(position: int) -> Recording | None:
        return resized(line, replace(first, size=line.size_at(position)), position)

    exact = at(0)
    if exact is None:
        return
    wider = int((_HEADROOM - 1) * line.from_zero(0))
    if fits(exact):
        low, high = 0, 1 + min((one for one in line.recorded if one >= 0), default=wider)
        while high - low > 1:
            middle = (low + high) // 2
            one = at(middle)
            low, high = (middle, high) if one is not None and fits(one) else (low, middle)
        exact = at(low) or exact
    elif wider:
        wide = at(wider)
        if wide is not None:
            yield wide
    yield exact
