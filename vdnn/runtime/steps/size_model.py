"""The recorded steps of one kind, by the sizes of their first saves, and the steps of other sizes they predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vdnn import _C
from vdnn.planning.recorded_step import recorded_step
from vdnn.runtime.steps.resized_steps import Line, ResizedStep, Sizes, guessed, lines_through, resized
from vdnn.step.made_steps import first_save, with_resident
from vdnn.step.recording import Recording, SaveKey

# A made step is this much larger than the one that it is made for, in the size that changes.
_HEADROOM = 1.02
# A step is worth recording if it is larger or smaller than these shares of all that were recorded.
_LARGER = 1.05
_MUCH_SMALLER = 0.7
_MOST_RECORDINGS = 8


class Made(NamedTuple):
    """A step that was not recorded. `is_guess`: extrapolated from one recording."""

    recording: Recording
    is_guess: bool


class SizePrediction(NamedTuple):
    """Predicts steps that begin with `first`, from the lines of sizes through recorded steps, or from one of these
    steps as a guess."""

    first: SaveKey
    lines: tuple[Line, ...]
    guess_from: Recording
    is_guess: bool

    def steps(self, room: Callable[[_C.RecordedStep], int]) -> Iterator[Made]:
        """Predicted steps, each at least as large as the one that begins with `first`, the best one first. `room` gives
        the bytes that a step with everything kept leaves of the budget. If they are not below 0, the predicted step is
        the largest one of which that is true."""
        for line in self.lines:
            resident_bytes = max(one.resident_bytes for one in line.recorded.values())
            for resized_step in _made(line, self.first, resident_bytes, room):
                yield Made(resized_step.recording(), self.is_guess)
        if not self.lines:
            yield Made(guessed(self.guess_from, self.first), self.is_guess)


class RecordedSizes:
    """The recorded steps of one kind, at least one."""

    def __init__(self, recording: Recording, *, has_own_recomputes: bool, is_warm_up: bool = False) -> None:
        self._by_size: dict[Sizes, Recording] = {}
        self._have_own_recomputes: set[Sizes] = set()
        self._were_predicted: set[Sizes] = set()  # of sizes that were asked for, from these recordings
        self._warm_ups: set[Sizes] = set()  # of steps of the warm-up, which later ones replace
        self.note(recording, has_own_recomputes=has_own_recomputes, is_warm_up=is_warm_up)

    @staticmethod
    def of(recorded: Sequence[tuple[Recording, bool, bool]]) -> RecordedSizes:
        """Makes an object from recorded steps that `all()` of another one returned."""
        (first, has_own, is_warm_up), *others = recorded
        sizes = RecordedSizes(first, has_own_recomputes=has_own, is_warm_up=is_warm_up)
        for recording, has_own_too, is_early in others:
            sizes.note(recording, has_own_recomputes=has_own_too, is_warm_up=is_early)
        return sizes

    def all(self) -> list[tuple[Recording, bool, bool]]:
        """The recorded steps. Two flags for each say whether its recomputes were found in it and whether it belongs to
        the warm-up."""
        own, early = self._have_own_recomputes, self._warm_ups
        return [(recording, size in own, size in early) for size, recording in self._by_size.items()]

    def note(self, recording: Recording, *, has_own_recomputes: bool, is_warm_up: bool = False) -> None:
        """Remembers a recorded step. `has_own_recomputes`: it followed no plan, so its recomputes were found in it."""
        size = first_save(recording).size
        if has_own_recomputes:
            self._have_own_recomputes.add(size)
        known = None if size in self._warm_ups else self._by_size.get(size)
        if known is not None and known.managed_bytes >= recording.managed_bytes:
            return
        (self._warm_ups.add if is_warm_up else self._warm_ups.discard)(size)
        self._by_size[size] = recording
        self._were_predicted.clear()
        if len(self._by_size) > _MOST_RECORDINGS:  # the smallest and the largest tell most
            by_size = sorted(self._by_size, key=math.prod)
            del self._by_size[by_size[len(by_size) // 2]]

    @property
    def is_of_warm_up(self) -> bool:
        """True if no step after the warm-up was recorded."""
        return self._by_size.keys() <= self._warm_ups

    @property
    def ends(self) -> tuple[Recording, Recording] | None:
        """The smallest and the largest step; None if there is one size only."""
        by_size = sorted(self._by_size, key=math.prod)
        return None if len(by_size) < 2 else (self._by_size[by_size[0]], self._by_size[by_size[-1]])

    def learns_from(self, first: SaveKey) -> bool:
        """True if recording a step with this first save would improve predictions of other sizes."""
        sizes = self._by_size.keys() - self._warm_ups
        if first.size in sizes:
            return False
        elements, known = math.prod(first.size), list(map(math.prod, sizes))
        return len(known) < 2 or elements > _LARGER * max(known) or elements < _MUCH_SMALLER * min(known)

    def predicted(self, first: SaveKey) -> Recording:
        """Predicts the step that begins with this save, in the worst case by a guess."""
        found = (resized(line, first, 0) for line in self._lines(first))
        return next((one.recording() for one in found if one is not None), None) or guessed(self._nearest(first), first)

    def prediction_for(
        self, first: SaveKey, others: Sequence[RecordedSizes], *, is_served: bool
    ) -> SizePrediction | None:
        """Predicts a step that begins with this save; None if that was asked before. `others` are recordings of nearly
        the same steps, which are used if this could only guess. `is_served`: a plan of a larger step serves, so lines
        that predict only a part of the step are left out."""
        if first.size in self._were_predicted or (self.is_of_warm_up and not self._is_larger(first)):
            return None
        self._were_predicted.add(first.size)
        lines = self._lines(first, in_part=not is_served)
        is_guess = not lines
        if is_guess:
            lines = [line for one in others for line in one._lines(first, in_part=not is_served)]
        return SizePrediction(first, tuple(lines), self._nearest(first, others), is_guess)

    def _is_larger(self, first: SaveKey) -> bool:
        """True if it is larger than every recorded step and smaller in no dimension. Then only a guess is possible, and
        a guess is near."""
        alike = [size for size in self._by_size if len(size) == len(first.size)]
        return bool(alike) and all(all(map(int.__le__, size, first.size)) for size in alike)

    def _lines(self, first: SaveKey, *, in_part: bool = False) -> list[Line]:
        """The lines of sizes through this one. Steps of the warm-up are left out: a small difference in one grows along
        the line."""
        after_warm_up = {size: one for size, one in self._by_size.items() if size not in self._warm_ups}
        return lines_through(first.size, after_warm_up, in_part=in_part)

    def _nearest(self, first: SaveKey, others: Sequence[RecordedSizes] = ()) -> Recording:
        """The recording nearest in size, of those with recomputes of their own: errors of guesses would add up. The
        step counts with the bytes that were resident later: a step of the warm-up began without the state of the
        optimizer."""
        own = [one._by_size[size] for one in (self, *others) for size in one._have_own_recomputes & one._by_size.keys()]
        nearest = min(own or self._by_size.values(), key=lambda one: _ratio(first_save(one), first))
        return with_resident(nearest, max(one.resident_bytes for one in (nearest, *self._by_size.values())))


def _ratio(one: SaveKey, other: SaveKey) -> float:
    """The ratio of the two in each of their sizes."""
    sizes = zip(one.size, other.size, strict=False)
    return math.prod(max(pair) / max(1, min(pair)) for pair in sizes)


def _made(
    line: Line, first: SaveKey, resident_bytes: int, room: Callable[[_C.RecordedStep], int]
) -> Iterator[ResizedStep]:
    """Steps of the wanted size or larger: the largest that fits the budget with everything kept, or else one that is a
    little larger than wanted and one of exactly the wanted size."""

    def at(position: int) -> ResizedStep | None:
        return resized(line, replace(first, size=line.size_at(position)), position, resident_bytes)

    below = [one for one in line.recorded if one < 0]
    if not below:
        return
    wider = int((_HEADROOM - 1) * line.from_zero(0))
    above = min((one for one in line.recorded if one > 0), default=wider)
    exact = None
    if room(recorded_step(with_resident(line.recorded[max(below)], resident_bytes))) >= 0:  # else no larger step fits
        largest = at(above)
        if largest is not None and room(largest.step) >= 0:
            yield largest
            return
        exact = at(0)
        if exact is not None and room(exact.step) >= 0:
            yield _largest(exact, above, -1 if largest is None else room(largest.step), at, room)
            return
    wide = at(wider) if wider else None
    if wide is not None:
        yield wide
    exact = exact or at(0)
    if exact is not None:
        yield exact


def _largest(
    exact: ResizedStep,
    above: int,
    room_above: int,
    at: Callable[[int], ResizedStep | None],
    room: Callable[[_C.RecordedStep], int],
) -> ResizedStep:
    """The largest step that fits, of those from position 0, where `exact` is, to below `above`, where `room_above` is
    less than 0. It is looked for where a straight line through the room at both ends is 0, and the end that stays
    counts for half each time, because the line is a curve."""
    found, low, room_below = exact, 0, float(room(exact.step))
    below_above = float(room_above)
    while above - low > 1:
        share = room_below / (room_below - below_above)
        middle = low + min(max(1, round(share * (above - low))), above - low - 1)
        one = at(middle)
        left = -1 if one is None else room(one.step)
        if one is not None and left >= 0:
            found, low, room_below, below_above = one, middle, left, below_above / 2
        else:
            above, below_above, room_below = middle, left, room_below / 2
    return found
