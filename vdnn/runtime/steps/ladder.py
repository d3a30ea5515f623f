"""The plans of one kind of step, for one size after another: a ladder, whose rungs are plans.

A plan serves every step of its kind that is no larger: at each point that step takes no more. So a step follows the
lowest rung that serves it. Where no rung is known to, it follows the highest, and a guard takes over from where the
step is larger. Sizes between and above those that were recorded get rungs that are made of two recordings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from vdnn.planning.footprint import interval_bytes, stored_bytes
from vdnn.planning.planned_step import PlannedStep
from vdnn.runtime.steps.executor import Executor, Occupancy
from vdnn.step.forms import is_within
from vdnn.step.made_steps import first_save, resized, with_resident
from vdnn.step.plan import Action
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline

# A rung serves steps down to this share of its size well, and any step if it slows down by no more than `_FREE`. One
# that slows down by more than `_CHEAP` is worth recording a smaller step for.
_NEAR = 0.95
_FREE = 1.005
_CHEAP = 1.1
# A rung that is made for a step above all others is this much larger than it, in the size that changes.
_HEADROOM = 1.05
# A step is recorded, though a rung serves it, if it is smaller than this share of all that were recorded.
_MUCH_SMALLER = 0.7
# The most rungs, recordings, and sizes of first saves that one kind remembers.
_MOST_RUNGS = 16
_MOST_RECORDINGS = 8
_MOST_SIZES = 64

Sizes = tuple[int, ...]  # of a first save


class Rung:
    """A plan that vdnn made, and what it was made from."""

    def __init__(self, planned: PlannedStep, recording: Recording, timeline: Timeline | None) -> None:
        self.timeline = timeline
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
        self._has_tried: set[Sizes] = set()  # sizes that no rung could be made for, from these recordings

    def choose(self, first: SaveKey) -> Rung | None:
        """The rung that is known to serve a step that begins with this save."""
        rungs = reversed(self.rungs) if self.records_all else self.rungs
        return next((rung for rung in rungs if rung.serves(first)), None)

    def deserves_own(self, rung: Rung, first: SaveKey) -> bool:
        """True if the plan of this rung is so slow that a step far below it gets one of its own."""
        return rung.slowdown > _CHEAP and rung.is_far_above(first) and len(self.rungs) < _MOST_RUNGS

    # What was recorded.

    def note(self, recording: Recording) -> None:
        """Remembers a recorded step, for those that are made of two."""
        size = first_save(recording).size
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
        return len(known) < 2 or elements > _HEADROOM * max(known) or elements < _MUCH_SMALLER * min(known)

    def made_for(self, first: SaveKey, fits: Callable[[Recording], bool]) -> Iterator[Recording]:
        """Steps made of recorded ones that are as large as one that begins with this save, the best one first. `fits`:
        a step that fits the budget with everything kept is made as large as it can be and still fit."""
        if first.size in self._has_tried:
            return
        self._has_tried.add(first.size)
        for dimension, wanted in enumerate(first.size):
            line = self._line(first, dimension)
            below = [one for size, one in line if size < wanted]
            above = [(size, one) for size, one in line if size >= wanted]
            if below and above:
                highest, pair = above[0][0], (below[-1], above[0][1])
            elif len(below) > 1:
                highest, pair = math.ceil(wanted * _HEADROOM), (below[0], below[-1])
            else:
                continue
            resident_bytes = max(one.resident_bytes for one in pair)
            pair = with_resident(pair[0], resident_bytes), with_resident(pair[1], resident_bytes)

            def at(size: int, dimension: int = dimension, pair: tuple[Recording, Recording] = pair) -> Recording | None:
                sizes = (*first.size[:dimension], size, *first.size[dimension + 1 :])
                return resized(*pair, replace(first, size=sizes), dimension)

            yield from _made(at, wanted, highest, fits)

    def _line(self, first: SaveKey, dimension: int) -> list[tuple[int, Recording]]:
        """The recordings whose first saves differ from this one in no other dimension, by their size in it."""

        def others(size: Sizes) -> Sizes:
            return size[:dimension] + size[dimension + 1 :]

        alike = [(size[dimension], one) for size, one in self._recordings.items() if others(size) == others(first.size)]
        return sorted(alike, key=lambda one: one[0])

    # Rungs.

    def find_near(self, first: SaveKey, recording: Recording) -> bool:
        """True if a rung serves a recorded step well, so that it needs none of its own."""
        nbytes = recording.managed_bytes
        return any(rung.serves(first) and _NEAR * rung.nbytes <= nbytes <= rung.nbytes for rung in self.rungs)

    def add(self, rung: Rung) -> None:
        """Adds a rung. Of rungs that begin alike the highest remains: the begin of a step cannot tell them apart."""
        alike = [one for one in self.rungs if one.first.size == rung.first.size]
        if any(one.nbytes > rung.nbytes for one in alike):
            return
        self.rungs = sorted([*(one for one in self.rungs if one not in alike), rung], key=lambda one: one.nbytes)
        if len(self.rungs) > _MOST_RUNGS:
            self.rungs.remove(min(self.rungs[:-1], key=lambda one: one.steps))


def _made(
    at: Callable[[int], Recording | None], wanted: int, highest: int, fits: Callable[[Recording], bool]
) -> Iterator[Recording]:
    """Steps of `wanted` or more, up to `highest`: the largest that fits, or one a little larger and one exactly so."""
    exact = at(wanted)
    if exact is None:
        return
    if fits(exact):
        low, high = wanted, highest + 1
        while high - low > 1:
            middle = (low + high) // 2
            one = at(middle)
            low, high = (middle, high) if one is not None and fits(one) else (low, middle)
        exact = at(low) or exact
    else:
        wider = at(min(highest, math.ceil(wanted * _HEADROOM)))
        if wider is not None:
            yield wider
    yield exact
