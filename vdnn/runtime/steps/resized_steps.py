"""Predicts a step of a size that was not recorded, from two or three recorded steps on a line of sizes.

The sizes of first saves are on a line if they grow in proportion: texts of other lengths, images of other sides. The
storages of a step (activations, the maps of attention, images) grow along such a line as a polynomial of the second
degree, so three recorded steps determine every other one. The native core computes the numbers
(csrc/planning/resized_step.h).

[Note: Two steps] Two steps also determine the bytes of a storage, because each of its sizes grows in proportion. Other
numbers lie between two curves: the straight line through both steps, and a multiple of the square. Between the two
steps the straight line is the upper curve, above both steps the square is.

[Note: One step] One step permits a rough extrapolation, so that the first longer text has a plan. If a size of a save
equals a size of the first save, or a product of such sizes, it grows in the same way; sides of images are halved a few
times. Temporary memory and times grow with the storages that are saved or used at that point.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from vdnn import _C
from vdnn.planning.recorded_step import keep_step, recorded_step
from vdnn.step.made_steps import (
    beginning_with,
    first_save,
    live_bytes,
    order_of,
    recompute_of_size,
    with_whole_peaks,
)
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey

Sizes = tuple[int, ...]
_SMALL = 1 / 256
_LEAST_SIZE = 2
_IMAGES = 4  # sizes of a batch of images
_MOST_HALVINGS = 6


class Line(NamedTuple):
    """Sizes that are `apart` from one position to the next. `wanted` is at position 0. `recorded` has steps by their
    positions."""

    wanted: Sizes
    apart: Sizes
    recorded: dict[int, Recording]

    def size_at(self, position: int) -> Sizes:
        return tuple(size + position * apart for size, apart in zip(self.wanted, self.apart, strict=True))

    def from_zero(self, position: int) -> float:
        """The distance of this position from the one at which the first changing size would be zero."""
        return position + max(size / apart for size, apart in zip(self.wanted, self.apart, strict=True) if apart)


def lines_through(wanted: Sizes, recorded: dict[Sizes, Recording], *, in_part: bool = False) -> list[Line]:
    """The lines through the wanted size and at least two recorded sizes, the one with most recorded sizes first.

    A line whose steps do not save and use the same tensors in the same order is left out. With `in_part` it is kept
    with its nearest steps: a shorter step may lack saves that are too small to be managed there."""
    found: dict[Sizes, dict[int, Recording]] = {}
    for size, recording in recorded.items():
        if len(size) != len(wanted) or size == wanted:  # also (), the size of a number
            continue
        difference = tuple(map(operator.sub, size, wanted))
        position = math.gcd(*difference)
        if max(difference) <= 0:
            position = -position
        if position and min(one // position for one in difference) >= 0:
            found.setdefault(tuple(one // position for one in difference), {})[position] = recording
    lines = [
        Line(wanted, apart, _alike_nearest(steps) if in_part else steps)
        for apart, steps in found.items()
        if len(steps) > 1
    ]
    return sorted(lines, key=lambda line: -len(line.recorded))


def _alike_nearest(steps: dict[int, Recording]) -> dict[int, Recording]:
    """The positions of one order of saves that has at least two of them, nearest to 0; all if there is none."""
    of_order: dict[object, dict[int, Recording]] = {}
    for position in sorted(steps, key=abs):
        of_order.setdefault(order_of(steps[position]), {})[position] = steps[position]
    return next((alike for alike in of_order.values() if len(alike) > 1), steps)


class ResizedStep(NamedTuple):
    """A step that was made of recorded ones of other sizes. `step` has its numbers, and `last`, the largest of those
    recorded steps, everything else. It begins with `first`."""

    step: _C.RecordedStep
    last: Recording
    first: SaveKey
    resident_bytes: int

    def recording(self) -> Recording:
        last, step = self.last, self.step
        points = [
            Point(old.kind, old.lifetime, old.key, compute_ns, allocated, peak, old.operation, old.issue_ns)
            for old, (_, _, _, compute_ns, allocated, peak, _) in zip(last.points, step.points, strict=True)
        ]
        lifetimes = tuple(
            Lifetime(
                now[0],
                old.saves,
                old.uses,
                old.read,
                old.copy_point,
                old.free_point,
                old.end_point,
                None if numbers is None or old.recompute is None else _recompute_of(old.recompute, *numbers),
            )
            for old, now, numbers in zip(last.lifetimes, step.lifetimes, step.recomputes, strict=True)
        )
        made = replace(
            last,
            resident_bytes=self.resident_bytes,
            points=tuple(beginning_with(self.first, points)),
            lifetimes=lifetimes,
        )
        keep_step(made, step)
        return made


def _recompute_of(
    old: Recompute, compute_ns: int, extra_bytes: int, kept_bytes: int, discard_ns: int, discard_bytes: int
) -> Recompute:
    amounts = compute_ns, extra_bytes, kept_bytes, discard_ns, discard_bytes
    return Recompute(old.operation, old.inputs, old.known_point, *amounts, old.issue_ns, old.discard_issue_ns)


def resized(line: Line, first: SaveKey, position: int, resident_bytes: int | None = None) -> ResizedStep | None:
    """The step at a position of a line, which begins with `first`; None if it is below all recorded ones, or if they
    do not determine it. `resident_bytes` are allocated when it begins, if not as much as when they were recorded."""
    if position < min(line.recorded):
        return None
    chosen = _telling(line.recorded, position)
    recorded = [line.recorded[one] for one in chosen]
    if len(recorded) < 2:
        return None
    more_bytes = [0 if resident_bytes is None else resident_bytes - one.resident_bytes for one in recorded]
    curve = curve_through([line.from_zero(one) for one in chosen], line.from_zero(position))
    step = curve.resized(list(map(recorded_step, recorded)), more_bytes, first.size)
    last = recorded[-1]
    resident = last.resident_bytes if resident_bytes is None else resident_bytes
    return None if step is None else ResizedStep(step, last, first, resident)


def curve_through(known: Sequence[float], wanted: float) -> _C.SizeCurve:
    """The curve of numbers that are known at two or three sizes, in ascending order, at another size. See [Note: Two
    steps]. Numbers from three steps stay within the same bounds, because times are measured."""
    shares = [math.prod((wanted - other) / (one - other) for other in known if other != one) for one in known]
    above = next((index for index, one in enumerate(known) if one >= wanted), len(known) - 1)
    pair = max(0, above - 1), max(1, above)
    lower, upper = (known[index] for index in pair)
    along_line, with_square = ((wanted**power - upper**power) / (upper**power - lower**power) for power in (1, 2))
    return _C.SizeCurve(
        shares=shares, pair=pair, along_line=along_line, with_square=with_square, is_above=wanted > upper
    )


def _telling(positions: Iterable[int], wanted: int) -> list[int]:
    """The two positions next to the wanted one, and the one furthest from it; or the smallest, the largest and the one
    in the middle, if all are below it. Fewer, if there are fewer."""
    known = sorted(positions)
    above = next((index for index, one in enumerate(known) if one >= wanted), None)
    if above is None:
        return sorted({known[0], known[len(known) // 2], known[-1]})
    near = known[max(0, above - 1) : max(0, above - 1) + 2]
    return sorted({*near, max(known, key=lambda one: abs(one - wanted))})


def guessed(recording: Recording, first: SaveKey) -> Recording:
    """The step as large as one that begins with `first`. See [Note: One step]."""
    before = first_save(recording).size
    growth = []
    known: dict[Sizes, float] = {}  # most saves have one of a few sizes
    grown = functools.cache(lambda size, index: _grown(size, index, before, first.size))
    for one in recording.lifetimes:
        key = recording.points[one.saves[0]].key
        size = () if key is None else key.size
        if size not in known:
            known[size] = math.prod(map(grown, size, itertools.count())) / max(1, math.prod(size))
        growth.append(known[size])
    of_points = [1.0]
    least_bytes = _SMALL * max(one.nbytes for one in recording.lifetimes)
    for point in recording.points:  # a small storage (statistics of a norm) does not tell what its operation takes
        is_small = point.lifetime is None or recording.lifetimes[point.lifetime].nbytes < least_bytes
        of_points.append(of_points[-1] if is_small or point.lifetime is None else growth[point.lifetime])
    del of_points[0]
    nearby = [max(of_points[max(0, index - 1) : index + 1]) for index in range(len(of_points))]
    nearby[-1] = 1.0  # optimizers
    lifetimes = tuple(
        Lifetime(
            math.ceil(one.nbytes * grows),
            one.saves,
            one.uses,
            one.read,
            one.copy_point,
            one.free_point,
            one.end_point,
            None if one.recompute is None else recompute_of_size(one.recompute, grows),
        )
        for one, grows in zip(recording.lifetimes, growth, strict=True)
    )
    live, live_before = (live_bytes(each, len(of_points)) for each in (lifetimes, recording.lifetimes))
    fixed = _fixed_bytes(recording, live_before)
    points = []
    for index, point in enumerate(recording.points):
        before_bytes, after_bytes = live_before[index] + fixed[index], live[index] + fixed[index]
        points.append(
            Point(
                point.kind,
                point.lifetime,
                point.key,
                math.ceil(point.compute_ns * nearby[index]),
                after_bytes + math.ceil((point.allocated_bytes - before_bytes) * nearby[index]),
                after_bytes + math.ceil((point.peak_bytes - before_bytes) * nearby[index]),
                point.operation,
                point.issue_ns,
            )
        )
    return replace(recording, points=with_whole_peaks(beginning_with(first, points)), lifetimes=lifetimes)


def _fixed_bytes(recording: Recording, live: list[int]) -> list[int]:
    """The bytes at each point that do not grow: the memory that is allocated during the whole step, and in the backward
    pass the gradients of parameters, which accumulate until its end."""
    others = [point.allocated_bytes - held for point, held in zip(recording.points, live, strict=True)]
    until_end = list(itertools.accumulate(reversed(others), min))[::-1]
    is_use = [point.kind is not PointKind.SAVE for point in recording.points]
    shares = (used / sum(is_use) for used in itertools.accumulate(is_use))
    least, most = min(others), recording.parameter_bytes
    return [least + int(min(stays - least, most) * share) for stays, share in zip(until_end, shares, strict=True)]


def _grown(size: int, index: int, before: Sizes, after: Sizes) -> int:
    """One size of a save (of the first save at `index` 0), if the sizes of the first save change from the old to the
    new ones. The largest product that explains the size counts."""
    found = [(0, size)]
    for count in range(1, len(before) + 1):
        for chosen in itertools.combinations(range(len(before)), count):
            old, new = (math.prod(sizes[one] for one in chosen) for sizes in (before, after))
            if old < _LEAST_SIZE or (index > 0 and chosen == (0,)):  # as many channels as texts
                continue
            if size in (old, old - 1):  # a text without its last word
                found.append((old, new - (old - size)))
            elif index == 0 and size % old == 0 and old != new:  # texts times heads
                found.append((old, size // old * new))
    if index < len(before) and len(before) == _IMAGES:
        for halvings in range(1, _MOST_HALVINGS):
            if size == math.ceil(before[index] / 2**halvings):
                found.append((size, math.ceil(after[index] / 2**halvings)))
    return max(found)[1]
