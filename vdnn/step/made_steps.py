"""Makes steps that were not recorded from recorded ones: their plans serve steps of other sizes.

The step that covers two recorded ones is as large as the larger of the two everywhere. Experts are each largest in
another step: a plan for one of these steps does not serve the others, but one for the step that covers them does.

A step of another size is made of recorded ones in vdnn/runtime/steps/resized_steps.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from vdnn.step.forms import Form, Forms, without_numbers
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey

# Numbers of recorded steps: one sequence for each step, all in the same order.
Amounts = Sequence[Sequence[int]]


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

    def more(amounts: Amounts) -> list[int]:
        return [after + math.ceil(max(0, after - before) * growth) for before, after in zip(*amounts, strict=True)]

    return made_of((small, large), first, more)


def made_of(
    steps: Sequence[Recording],
    first: SaveKey,
    more: Callable[[Amounts], list[int]],
) -> Recording | None:
    """A recording of a step that begins with `first`, in which every number is made of those of recorded steps, the
    last of which is the largest; None if they do not save and use the same things in the same order."""
    order = order_of(steps[0])
    if any(order_of(one) != order for one in steps[1:]):
        return None
    last = steps[-1]
    nbytes = [[one.nbytes for one in step.lifetimes] for step in steps]
    lifetimes = tuple(
        Lifetime(now, one.saves, one.uses, one.read, one.copy_point, one.free_point, one.end_point, recompute)
        for one, now, recompute in zip(last.lifetimes, more(nbytes), _resized_recomputes(steps, more), strict=True)
    )
    live = [live_bytes(one.lifetimes, len(last.points)) for one in steps]
    held = [list(zip(step.points, now, strict=True)) for step, now in zip(steps, live, strict=True)]
    points = [
        Point(
            point.kind,
            point.lifetime,
            point.key,
            compute_ns,
            now + allocated_bytes,
            now + peak_bytes,
            point.operation,
            point.issue_ns,
        )
        for point, now, compute_ns, allocated_bytes, peak_bytes in zip(
            last.points,
            live_bytes(lifetimes, len(last.points)),
            more([[point.compute_ns for point in step.points] for step in steps]),
            more([[point.allocated_bytes - now for point, now in of_step] for of_step in held]),
            more([[point.peak_bytes - now for point, now in of_step] for of_step in held]),
            strict=True,
        )
    ]
    return replace(last, points=with_whole_peaks(beginning_with(first, points)), lifetimes=lifetimes)


def beginning_with(first: SaveKey, points: Sequence[Point]) -> list[Point]:
    """The same points, the first save of which is this one."""
    begin = next(index for index, point in enumerate(points) if point.key is not None)
    return [*points[:begin], replace(points[begin], key=first), *points[begin + 1 :]]


def with_whole_peaks(points: Sequence[Point]) -> tuple[Point, ...]:
    """The same points, each peak at least the bytes allocated before and after it, as in every recorded step. Peaks
    that are made of others may miss that by a little. Plans would then fit where they are searched for, but not where
    they are simulated."""
    before_bytes = [0, *(point.allocated_bytes for point in points)]
    return tuple(
        point
        if point.peak_bytes >= max(point.allocated_bytes, before)
        else Point(  # dataclasses.replace takes twice as long, and trainings wait for this
            point.kind,
            point.lifetime,
            point.key,
            point.compute_ns,
            point.allocated_bytes,
            max(point.allocated_bytes, before),
            point.operation,
            point.issue_ns,
        )
        for point, before in zip(points, before_bytes, strict=False)
    )


def _resized_recomputes(steps: Sequence[Recording], more: Callable[[Amounts], list[int]]) -> list[Recompute | None]:
    """The recompute of each lifetime that has the same recipe in all steps."""
    found: list[list[Recompute]] = []
    numbers = []
    for number, lifetimes in enumerate(zip(*(one.lifetimes for one in steps), strict=True)):
        each = [one.recompute for one in lifetimes if one.recompute is not None]
        last = each[-1] if len(each) == len(lifetimes) else None
        if last is not None and all(one.operation == last.operation and one.inputs == last.inputs for one in each):
            found.append(each)
            numbers.append(number)
    resized: list[Recompute | None] = [None] * len(steps[-1].lifetimes)
    of_steps = list(zip(*found, strict=True))
    if not of_steps:
        return resized
    amounts = zip(
        more([[one.compute_ns for one in each] for each in of_steps]),
        more([[one.extra_bytes for one in each] for each in of_steps]),
        more([[one.kept_bytes for one in each] for each in of_steps]),
        more([[one.discard_ns for one in each] for each in of_steps]),
        more([[one.discard_bytes for one in each] for each in of_steps]),
        strict=True,
    )
    for number, one, made in zip(numbers, of_steps[-1], amounts, strict=True):
        resized[number] = Recompute(
            one.operation, one.inputs, one.known_point, *made, one.issue_ns, one.discard_issue_ns
        )
    return resized


def with_recomputes_of(other: Recording, recording: Recording) -> Recording:
    """The recording with the recomputes of another one of its kind, as much larger as their storages are. A step that
    follows a plan looks for none itself. A save that the other step does not have (an expert without tokens) gets the
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

    return Recompute(  # dataclasses.replace() takes six times as long, and trainings wait for this
        recompute.operation,
        recompute.inputs,
        recompute.known_point,
        more(recompute.compute_ns),
        more(recompute.extra_bytes),
        more(recompute.kept_bytes),
        more(recompute.discard_ns),
        more(recompute.discard_bytes),
        recompute.issue_ns,
        recompute.discard_issue_ns,
    )


def with_resident(recording: Recording, resident_bytes: int) -> Recording:
    """The same step with `resident_bytes` allocated when it begins."""
    more_bytes = resident_bytes - recording.resident_bytes
    if not more_bytes:
        return recording
    points = tuple(
        Point(
            point.kind,
            point.lifetime,
            point.key,
            point.compute_ns,
            point.allocated_bytes + more_bytes,
            point.peak_bytes + more_bytes,
            point.operation,
            point.issue_ns,
        )
        for point in recording.points
    )
    return replace(recording, resident_bytes=resident_bytes, points=points)


def with_more_resident(recording: Recording, more_bytes: int) -> Recording:
    """The same step with `more_bytes` more allocated when it begins, as a later one has them. At its end, the memory
    that the step itself left besides gradients (the optimizer's state, in a first step) is already among these
    bytes."""
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
    points = [
        (point.kind, point.lifetime, None if point.key is None else len(point.key.size)) for point in recording.points
    ]
    return tuple(points), tuple([(one.saves, one.uses) for one in recording.lifetimes])


def live_bytes(lifetimes: tuple[Lifetime, ...], points: int) -> list[int]:
    """The bytes of the lifetimes that exist at each point with everything kept."""
    changes = [0] * (points + 1)
    for one in lifetimes:
        changes[one.saves[0]] += one.nbytes
        changes[one.end_point] -= one.nbytes
    return list(itertools.accumulate(changes[:points]))


def _larger_point(one: Point, other: Point, live: int, live_of_one: int, live_of_other: int) -> Point:
    """Memory of no lifetime (transient results, parameters) is the larger of the two, and comes on top of `live`."""
    return Point(
        one.kind,
        one.lifetime,
        None if one.key is None or other.key is None else _larger_key(one.key, other.key),
        max(one.compute_ns, other.compute_ns),
        live + max(one.allocated_bytes - live_of_one, other.allocated_bytes - live_of_other),
        live + max(one.peak_bytes - live_of_one, other.peak_bytes - live_of_other),
        one.operation,
        one.issue_ns,
    )


def _larger_key(one: SaveKey, other: SaveKey) -> SaveKey:
    if one.size == other.size:
        return one
    size = tuple(map(max, one.size, other.size))
    return replace(one, size=size, stride=one.stride if size == one.size else other.stride)


def _larger_lifetime(one: Lifetime, other: Lifetime) -> Lifetime:
    return Lifetime(
        max(one.nbytes, other.nbytes),
        one.saves,
        one.uses,
        tuple(map(max, one.read, other.read)),
        max(one.copy_point, other.copy_point),
        max(one.free_point, other.free_point),
        max(one.end_point, other.end_point),
        _larger_recompute(one.recompute, other.recompute),
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
