"""Makes steps that were not recorded from recorded ones: their plans serve steps of other sizes.

The step that covers two recorded ones is as large as the larger of the two everywhere. Experts are each largest in
another step: a plan for one of these steps does not serve the others, but one for the step that covers them does.

A step of another size is made of recorded ones in resized_steps.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from vdnn.step.forms import Form, Forms, without_numbers
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey


def covering(one: Recording, other: Recording) -> Recording | None:
    """A recording in which every storage, every point and every time is as large as the larger of the two; None if the
    two do not save and use the same tensors in the same order."""
    if order_of(one) != order_of(other):
        return None
    lifetimes = tuple(map(_larger_lifetime, one.lifetimes, other.lifetimes))
    live = live_bytes(lifetimes, len(one.points))
    before = live_bytes(one.lifetimes, len(one.points)), live_bytes(other.lifetimes, len(one.points))
    points = tuple(
        _larger_point(first, second, live[index], before[0][index], before[1][index])
        for index, (first, second) in enumerate(zip(one.points, other.points, strict=True))
    )
    return replace(
        one,
        resident_bytes=max(one.resident_bytes, other.resident_bytes),
        parameter_bytes=max(one.parameter_bytes, other.parameter_bytes),
        points=with_whole_peaks(points),
        lifetimes=lifetimes,
    )


def grown(small: Recording, large: Recording, first: SaveKey, growth: float) -> Recording | None:
    """A recording of a step that begins with `first`, and is larger than `large` by `growth` times the difference of
    the two; None if they do not save and use the same tensors in the same order."""

    def more(amounts: Sequence[int]) -> int:
        before, after = amounts
        return after + math.ceil(max(0, after - before) * growth)

    return made_of((small, large), first, more)


def made_of(
    steps: Sequence[Recording],
    first: SaveKey,
    more: Callable[[Sequence[int]], int],
    stored: Callable[[Sequence[SaveKey], Sequence[int]], int] | None = None,
) -> Recording | None:
    """A recording of a step that begins with `first`, in which every number is made of those of recorded steps, the
    last of which is the largest; None if they do not save and use the same things in the same order. `stored` makes
    the bytes of a storage, from its first saves too."""
    order = order_of(steps[0])
    if any(order_of(one) != order for one in steps[1:]):
        return None

    def nbytes(lifetimes: Sequence[Lifetime]) -> int:
        sizes = [one.nbytes for one in lifetimes]
        keys = [step.points[one.saves[0]].key for step, one in zip(steps, lifetimes, strict=True)]
        return more(sizes) if stored is None else stored([key for key in keys if key is not None], sizes)

    # A training waits while steps are made, and dataclasses.replace() takes six times as long as a constructor.
    lifetimes = tuple(
        Lifetime(
            nbytes(each),
            each[-1].saves,
            each[-1].uses,
            each[-1].read,
            each[-1].copy_point,
            each[-1].free_point,
            each[-1].end_point,
            _resized_recompute(each, more),
        )
        for each in zip(*(one.lifetimes for one in steps), strict=True)
    )
    last = steps[-1]
    live = [live_bytes(one.lifetimes, len(last.points)) for one in steps]
    others = [
        [(point.allocated_bytes - now, point.peak_bytes - now) for point, now in zip(step.points, held, strict=True)]
        for step, held in zip(steps, live, strict=True)
    ]
    points = [
        Point(
            point.kind,
            point.lifetime,
            point.key,
            more([step.points[index].compute_ns for step in steps]),
            now + more([one[index][0] for one in others]),
            now + more([one[index][1] for one in others]),
            point.operation,
            point.issue_ns,
        )
        for index, (point, now) in enumerate(zip(last.points, live_bytes(lifetimes, len(last.points)), strict=True))
    ]
    return replace(last, points=with_whole_peaks(beginning_with(first, points)), lifetimes=lifetimes)


def beginning_with(first: SaveKey, points: Sequence[Point]) -> list[Point]:
    """The same points, the first save of which is this one."""
    begin = next(index for index, point in enumerate(points) if point.key is not None)
    return [replace(point, key=first) if index == begin else point for index, point in enumerate(points)]


def with_whole_peaks(points: Sequence[Point]) -> tuple[Point, ...]:
    """The same points, each peak at least the bytes allocated before and after it, as in every recorded step. Peaks
    that are made of others may miss that by a little. Plans would then fit where they are searched for, but not where
    they are simulated."""
    before_bytes = [0, *(point.allocated_bytes for point in points)]
    return tuple(
        point
        if point.peak_bytes >= max(point.allocated_bytes, before)
        else replace(point, peak_bytes=max(point.allocated_bytes, before))
        for point, before in zip(points, before_bytes, strict=False)
    )


def _resized_recompute(lifetimes: Sequence[Lifetime], more: Callable[[Sequence[int]], int]) -> Recompute | None:
    found = [one.recompute for one in lifetimes if one.recompute is not None]
    if len(found) < len(lifetimes) or len({(one.operation, one.inputs) for one in found}) > 1:
        return None
    last = found[-1]
    return Recompute(
        last.operation,
        last.inputs,
        last.known_point,
        more([one.compute_ns for one in found]),
        more([one.extra_bytes for one in found]),
        more([one.kept_bytes for one in found]),
        more([one.discard_ns for one in found]),
        more([one.discard_bytes for one in found]),
        last.issue_ns,
        last.discard_issue_ns,
    )


def with_recomputes_of(other: Recording, recording: Recording) -> Recording:
    """The recording with the recomputes of another one of its kind, as much larger as their storages are. A step that
    follows a plan looks for none itself. A save that the other one has not (an expert that had no tokens) gets the
    recompute of the save that differs from it in numbers only."""
    if any(one.recompute is not None for one in recording.lifetimes):
        return recording
    forms, known_forms = _forms_of(recording), _forms_of(other)
    numbers = {form: number for number, form in enumerate(forms)}
    known_numbers = {form: number for number, form in enumerate(known_forms)}
    alike = {without_numbers(form): number for form, number in known_numbers.items()}

    def recompute(number: int) -> Recompute | None:
        form, one = forms[number], recording.lifetimes[number]
        is_known = form in known_numbers
        known = known_numbers.get(form, alike.get(without_numbers(form)))
        if known is None:
            return None
        before = other.lifetimes[known]
        if before.recompute is None:
            return None
        inputs = []
        for wanted in map(known_forms.__getitem__, before.recompute.inputs):
            near = number + known_numbers[wanted] - known
            each = numbers.get(wanted, near) if is_known else near
            if not 0 <= each < len(forms) or without_numbers(forms[each]) != without_numbers(wanted):
                return None
            inputs.append(each)
        known_point = min(one.saves[0] + before.recompute.known_point - before.saves[0], len(recording.points) - 1)

        larger = max(1, one.nbytes / max(1, before.nbytes))
        return replace(recompute_of_size(before.recompute, larger), inputs=tuple(inputs), known_point=known_point)

    found = [replace(one, recompute=recompute(number)) for number, one in enumerate(recording.lifetimes)]
    return replace(recording, lifetimes=tuple(found))


def _forms_of(recording: Recording) -> list[Form]:
    """The forms of the first saves of all lifetimes."""
    forms = Forms()
    found: list[Form] = []
    for point in recording.points:
        if point.kind is PointKind.SAVE and point.key is not None:
            form = forms.of(point.key)
            if point.lifetime == len(found):
                found.append(form)
    return found


def recompute_of_size(recompute: Recompute, larger: float) -> Recompute:
    """The recompute of a storage that is larger by this factor."""

    def more(amount: int) -> int:
        return math.ceil(amount * larger)

    return replace(
        recompute,
        compute_ns=more(recompute.compute_ns),
        extra_bytes=more(recompute.extra_bytes),
        kept_bytes=more(recompute.kept_bytes),
        discard_ns=more(recompute.discard_ns),
        discard_bytes=more(recompute.discard_bytes),
    )


def with_resident(recording: Recording, resident_bytes: int) -> Recording:
    """The same step with `resident_bytes` allocated when it begins."""
    more_bytes = resident_bytes - recording.resident_bytes
    if not more_bytes:
        return recording
    points = tuple(
        replace(point, allocated_bytes=point.allocated_bytes + more_bytes, peak_bytes=point.peak_bytes + more_bytes)
        for point in recording.points
    )
    return replace(recording, resident_bytes=resident_bytes, points=points)


def with_more_resident(recording: Recording, more_bytes: int) -> Recording:
    """The same step with `more_bytes` more allocated when it begins, as a later one has them. Of these its end has what
    the step itself left besides gradients (the optimizer's state, in a first step) already."""
    later = with_resident(recording, recording.resident_bytes + more_bytes)
    *points, end = later.points
    left_bytes = recording.points[-1].allocated_bytes - recording.resident_bytes - recording.parameter_bytes
    there_bytes = min(more_bytes, max(0, left_bytes))
    end = replace(end, allocated_bytes=end.allocated_bytes - there_bytes, peak_bytes=end.peak_bytes - there_bytes)
    return replace(later, points=with_whole_peaks([*points, end]))


def first_point(recording: Recording) -> Point:
    """The first save."""
    return next(point for point in recording.points if point.key is not None)


def first_save(recording: Recording) -> SaveKey:
    return next(point.key for point in recording.points if point.key is not None)


def order_of(recording: Recording) -> tuple[object, ...]:
    """All saves and uses of the step in order, without sizes. Steps are made of others of one order only."""
    points = tuple(
        (point.kind, point.lifetime, None if point.key is None else len(point.key.size)) for point in recording.points
    )
    return points, tuple((one.saves, one.uses) for one in recording.lifetimes)


def live_bytes(lifetimes: tuple[Lifetime, ...], points: int) -> list[int]:
    """The bytes of the lifetimes that exist at each point with everything kept."""
    changes = [0] * (points + 1)
    for one in lifetimes:
        changes[one.saves[0]] += one.nbytes
        changes[one.end_point] -= one.nbytes
    return list(itertools.accumulate(changes[:points]))


def _larger_point(one: Point, other: Point, live: int, live_of_one: int, live_of_other: int) -> Point:
    """Memory of no lifetime (transient results, parameters) is the larger of the two, and comes on top of `live`."""
    return replace(
        one,
        key=None if one.key is None or other.key is None else _larger_key(one.key, other.key),
        compute_ns=max(one.compute_ns, other.compute_ns),
        allocated_bytes=live + max(one.allocated_bytes - live_of_one, other.allocated_bytes - live_of_other),
        peak_bytes=live + max(one.peak_bytes - live_of_one, other.peak_bytes - live_of_other),
    )


def _larger_key(one: SaveKey, other: SaveKey) -> SaveKey:
    size = tuple(map(max, one.size, other.size))
    return replace(one, size=size, stride=one.stride if size == one.size else other.stride)


def _larger_lifetime(one: Lifetime, other: Lifetime) -> Lifetime:
    return replace(
        one,
        nbytes=max(one.nbytes, other.nbytes),
        read=tuple(map(max, one.read, other.read)),
        copy_point=max(one.copy_point, other.copy_point),
        free_point=max(one.free_point, other.free_point),
        end_point=max(one.end_point, other.end_point),
        recompute=_larger_recompute(one.recompute, other.recompute),
    )


def _larger_recompute(one: Recompute | None, other: Recompute | None) -> Recompute | None:
    if one is None or other is None or (one.operation, one.inputs) != (other.operation, other.inputs):
        return None
    return replace(
        one,
        known_point=max(one.known_point, other.known_point),
        compute_ns=max(one.compute_ns, other.compute_ns),
        extra_bytes=max(one.extra_bytes, other.extra_bytes),
        kept_bytes=max(one.kept_bytes, other.kept_bytes),
        discard_ns=max(one.discard_ns, other.discard_ns),
        discard_bytes=max(one.discard_bytes, other.discard_bytes),
    )
