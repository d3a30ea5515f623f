"""Steps that were not recorded, made of those that were: what is planned for them serves steps of other sizes.

The step that covers two recorded ones is as large as the larger of the two everywhere. Micro-batches of several
lengths are each largest in another step: a plan for one of these steps does not serve the others, but one for the step
that covers them does.

An evened step is made of one: each of its micro-batches is as large as the largest. Its plan serves their sizes in any
order.

A resized step is of another size in one dimension of its first save, such as its length. Between two recorded ones its
bytes and times are on a straight line. Above both they are extrapolated as if they grew in proportion to that size and
as if they grew with its square, whichever is more: what training steps are made of (activations, and the maps of
attention) lies between the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from vdnn.step.forms import Form, Forms, without_numbers
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey


def covering(one: Recording, other: Recording) -> Recording | None:
    """A recording in which every storage, every point and every time is as large as the larger of the two; None if the
    two do not save and use the same things in the same order."""
    if _order_of(one) != _order_of(other):
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
        points=points,
        lifetimes=lifetimes,
    )


def resized(one: Recording, other: Recording, first: SaveKey, dimension: int) -> Recording | None:
    """A recording of a step that begins with `first`, made of two whose first saves differ from it in this dimension
    only; None if they tell nothing about it."""
    small, large = sorted((one, other), key=lambda recording: first_save(recording).size[dimension])
    least, most = (first_save(recording).size[dimension] for recording in (small, large))
    wanted = first.size[dimension]
    if not least < most or wanted < least:
        return None
    if wanted <= most:  # a straight line is never below what grows with a square
        growth = (wanted - most) / (most - least)
    else:
        growth = max((wanted**power - most**power) / (most**power - least**power) for power in (1, 2))
    return grown(small, large, first, growth)


def grown(small: Recording, large: Recording, first: SaveKey, growth: float) -> Recording | None:
    """A recording of a step that begins with `first`, and is larger than `large` by `growth` times the difference of
    the two; None if they do not save and use the same things in the same order."""
    if _order_of(small) != _order_of(large):
        return None

    def more(before: int, after: int) -> int:
        change = after - before
        return after + math.ceil((change if growth <= 0 else max(0, change)) * growth)

    lifetimes = tuple(
        replace(longer, nbytes=more(shorter.nbytes, longer.nbytes), recompute=_resized_recompute(shorter, longer, more))
        for shorter, longer in zip(small.lifetimes, large.lifetimes, strict=True)
    )
    live = [live_bytes(each, len(large.points)) for each in (small.lifetimes, large.lifetimes, lifetimes)]
    points = [
        replace(
            longer,
            compute_ns=more(shorter.compute_ns, longer.compute_ns),
            allocated_bytes=now + more(shorter.allocated_bytes - before, longer.allocated_bytes - after),
            peak_bytes=now + more(shorter.peak_bytes - before, longer.peak_bytes - after),
        )
        for shorter, longer, before, after, now in zip(small.points, large.points, *live, strict=True)
    ]
    begin = next(index for index, point in enumerate(points) if point.key is not None)
    points[begin] = replace(points[begin], key=first)
    return replace(large, points=tuple(points), lifetimes=lifetimes)


def _resized_recompute(shorter: Lifetime, longer: Lifetime, more: Callable[[int, int], int]) -> Recompute | None:
    small, large = shorter.recompute, longer.recompute
    if small is None or large is None or (small.operation, small.inputs) != (large.operation, large.inputs):
        return None
    return replace(
        large,
        compute_ns=more(small.compute_ns, large.compute_ns),
        extra_bytes=more(small.extra_bytes, large.extra_bytes),
        kept_bytes=more(small.kept_bytes, large.kept_bytes),
        discard_ns=more(small.discard_ns, large.discard_ns),
        discard_bytes=more(small.discard_bytes, large.discard_bytes),
    )


def evened(recording: Recording) -> Recording:
    """The recording with micro-batches that are each as large as the largest of their kind; itself, if it has none."""
    parts = _micro_batches(recording)
    largest: dict[tuple[object, ...], Recording] = {}
    for part in parts:
        order = _order_of(part)
        known = largest.get(order)
        covered = part if known is None else covering(known, part)
        largest[order] = part if covered is None else covered
    if len(largest) == len(parts):
        return recording
    points: list[Point] = []
    lifetimes: list[Lifetime] = []
    for part in parts:
        even = largest[_order_of(part)]
        points += (
            replace(point, lifetime=None if point.lifetime is None else point.lifetime + len(lifetimes))
            for point in even.points
        )
        lifetimes += [_moved(one, len(points) - len(even.points), len(lifetimes)) for one in even.lifetimes]
    end = recording.points[len(points) :]
    return replace(recording, points=(*points, *end), lifetimes=tuple(lifetimes))


def _micro_batches(recording: Recording) -> list[Recording]:
    """The parts of a step between which no lifetime exists, without the end of the step."""
    ends = [0] * len(recording.points)
    for one in recording.lifetimes:
        ends[one.saves[0]] = max(ends[one.saves[0]], one.end_point)
    parts: list[Recording] = []
    begin = begin_lifetime = last = lifetimes = 0
    for index, point in enumerate(recording.points):
        is_new = point.lifetime == lifetimes
        if is_new and last <= index and lifetimes > begin_lifetime:
            parts.append(_part(recording, begin, index, begin_lifetime, lifetimes))
            begin, begin_lifetime = index, lifetimes
        lifetimes += is_new
        last = max(last, ends[index])
    end = len(recording.points) - (recording.points[-1].kind is PointKind.END)
    parts.append(_part(recording, begin, end, begin_lifetime, lifetimes))
    return parts


def _part(recording: Recording, begin: int, end: int, begin_lifetime: int, end_lifetime: int) -> Recording:
    points = tuple(
        replace(point, lifetime=None if point.lifetime is None else point.lifetime - begin_lifetime)
        for point in recording.points[begin:end]
    )
    # Somebody else may hold a storage beyond the part, where the points of the next one are.
    lifetimes = tuple(
        _moved(replace(one, free_point=min(one.free_point, one.end_point)), -begin, -begin_lifetime)
        for one in recording.lifetimes[begin_lifetime:end_lifetime]
    )
    return replace(recording, points=points, lifetimes=lifetimes)


def _moved(one: Lifetime, points: int, lifetimes: int) -> Lifetime:
    """The lifetime at other points, among other lifetimes."""
    recompute = one.recompute
    if recompute is not None:
        inputs = tuple(each + lifetimes for each in recompute.inputs)
        recompute = replace(recompute, inputs=inputs, known_point=recompute.known_point + points)
    return replace(
        one,
        saves=tuple(each + points for each in one.saves),
        uses=tuple(each + points for each in one.uses),
        read=tuple(each + points for each in one.read),
        copy_point=one.copy_point + points,
        free_point=one.free_point + points,
        end_point=one.end_point + points,
        recompute=recompute,
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

        def more(amount: int) -> int:
            return math.ceil(amount * max(1, one.nbytes / max(1, before.nbytes)))

        return replace(_scaled(before.recompute, more), inputs=tuple(inputs), known_point=known_point)

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


def _scaled(recompute: Recompute, more: Callable[[int], int]) -> Recompute:
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
    points = tuple(
        replace(point, allocated_bytes=point.allocated_bytes + more_bytes, peak_bytes=point.peak_bytes + more_bytes)
        for point in recording.points
    )
    return replace(recording, resident_bytes=resident_bytes, points=points)


def first_point(recording: Recording) -> Point:
    """The first save."""
    return next(point for point in recording.points if point.key is not None)


def first_save(recording: Recording) -> SaveKey:
    return next(point.key for point in recording.points if point.key is not None)


def _order_of(recording: Recording) -> tuple[object, ...]:
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
