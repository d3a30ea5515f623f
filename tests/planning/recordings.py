"""Small recordings for tests of planning, made by hand or by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies

from vdnn.planning.costs import LinkCosts
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey

RESIDENT = 100


def key(number: int) -> SaveKey:
    return SaveKey("OpBackward0", f"layer{number}", "float32", (number + 1,), (1,), 0)


def chain(sizes: Sequence[int], compute_ns: int = 1000) -> Recording:
    """Storages are saved in order and used in reverse, each by one operation, without other holders.

    The result of an operation is allocated before its save. The storage of a use is released before the next point.
    """
    count = len(sizes)
    points, live = [], RESIDENT
    for index, size in enumerate(sizes):
        live += size
        points.append(Point(PointKind.SAVE, index, key(index), compute_ns, live, live))
    for index in reversed(range(count)):
        peak = live  # the storage of the previous use is released only at this point
        live = RESIDENT + sum(sizes[: index + 1])
        points.append(Point(PointKind.USE, index, None, compute_ns, live, peak))
    points.append(Point(PointKind.END, None, None, compute_ns, RESIDENT, live))
    lifetimes = tuple(
        Lifetime(size, (index,), (2 * count - 1 - index,), (2 * count - index,), index, index, 2 * count - index)
        for index, size in enumerate(sizes)
    )
    return Recording("cpu", "by hand", 1 << 40, "none", "virtual", RESIDENT, 0, tuple(points), lifetimes)


# Links on which copying a byte takes about as long as these recordings compute for each byte, one way or both.
LINKS = strategies.builds(
    lambda out, back, duplex, latency_ns: LinkCosts(out, back, max(out, back) + duplex * min(out, back), latency_ns),
    strategies.sampled_from([0.5e9, 1e9, 4e9]),
    strategies.sampled_from([0.5e9, 1e9, 4e9]),
    strategies.sampled_from([0.0, 0.5, 1.0]),
    strategies.integers(0, 5),
)


@strategies.composite
def any_recording(draw: strategies.DrawFn, most: int = 6) -> Recording:
    """Saves and uses in any order that a program can have: forks, joins, dead ends, late holders."""
    count = draw(strategies.integers(1, most))
    sizes = [draw(strategies.integers(1, 50)) for _ in range(count)]
    uses_of = [draw(strategies.integers(0, 2)) for _ in range(count)]
    events: list[tuple[PointKind, int]] = []
    waiting: list[int] = []
    unsaved = list(range(count))
    while unsaved or waiting:
        if unsaved and (not waiting or draw(strategies.booleans())):
            index = unsaved.pop(0)
            events.append((PointKind.SAVE, index))
            waiting += [index] * uses_of[index]
        else:
            events.append((PointKind.USE, waiting.pop(draw(strategies.integers(0, len(waiting) - 1)))))
    end = len(events)
    lifetimes = []
    for index in range(count):
        saved = events.index((PointKind.SAVE, index))
        uses = tuple(place for place, event in enumerate(events) if event == (PointKind.USE, index))
        last = uses[-1] + 1 if uses else draw(strategies.integers(saved + 1, end))
        copied = draw(strategies.integers(saved, min(saved + 1, last)))
        freed = draw(strategies.integers(saved, last))
        lifetimes.append(Lifetime(sizes[index], (saved,), uses, tuple(use + 1 for use in uses), copied, freed, last))
    points = []
    for place in range(end + 1):
        live = RESIDENT + sum(one.nbytes for one in lifetimes if one.saves[0] <= place < one.end_point)
        before = RESIDENT + sum(one.nbytes for one in lifetimes if one.saves[0] < place <= one.end_point)
        working = draw(strategies.integers(0, 20))
        kind, lifetime = events[place] if place < end else (PointKind.END, None)
        saved_key = key(lifetime) if kind is PointKind.SAVE and lifetime is not None else None
        compute_ns = draw(strategies.integers(0, 40))
        points.append(Point(kind, lifetime, saved_key, compute_ns, live, max(before, live) + working))
    return Recording("cpu", "any", 1 << 40, "none", "virtual", RESIDENT, 0, tuple(points), tuple(lifetimes))


def recomputable(
    recording: Recording, index: int, inputs: tuple[int, ...], compute_ns: int, extra: int = 0
) -> Recording:
    """The recording with a recipe for lifetime `index`, which is known once the lifetime is saved."""
    old = recording.lifetimes[index]
    recompute = Recompute("Op", inputs, old.copy_point, compute_ns, old.nbytes + extra)
    lifetimes = tuple(
        replace(one, recompute=recompute) if place == index else one for place, one in enumerate(recording.lifetimes)
    )
    return replace(recording, lifetimes=lifetimes)


def compressible(recording: Recording, index: int, discard_ns: int, discard_bytes: int = 0) -> Recording:
    """The recording with a codec for lifetime `index`. An eighth of the bytes remains, from the point after its copy
    point."""
    old = recording.lifetimes[index]
    assert old.recompute is not None, "it can be recomputed"
    known = min(old.copy_point + 1, len(recording.points) - 1)
    kept_bytes = -(-old.nbytes // 8)
    recompute = replace(
        old.recompute,
        known_point=known,
        kept_bytes=kept_bytes,
        discard_ns=discard_ns,
        discard_bytes=discard_bytes,
    )
    lifetimes = tuple(
        replace(one, recompute=recompute) if place == index else one for place, one in enumerate(recording.lifetimes)
    )
    return replace(recording, lifetimes=lifetimes)


@strategies.composite
def any_recomputable_recording(draw: strategies.DrawFn, most: int = 4) -> Recording:
    """Any recording in which some lifetimes can be recomputed from earlier ones."""
    recording = draw(any_recording(most))
    for index in range(len(recording.lifetimes)):
        if draw(strategies.booleans()):
            inputs = tuple(one for one in range(index) if draw(strategies.booleans()))
            compute_ns, extra = draw(strategies.integers(0, 60)), draw(strategies.integers(0, 20))
            recording = recomputable(recording, index, inputs, compute_ns, extra)
            if not inputs and draw(strategies.booleans()):
                recording = compressible(recording, index, draw(strategies.integers(0, 10)))
    return recording
