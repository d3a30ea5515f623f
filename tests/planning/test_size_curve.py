"""The native core's curves of sizes give the numbers of the reference, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import any_recomputable_recording, chain
from tests.planning.reference.size_curve import ReferenceCurve
from tests.planning.test_host_lane import hosts
from vdnn.errors import InvalidArgumentError
from vdnn.planning.recorded_step import recorded_step
from vdnn.runtime.steps.resized_steps import ResizedStep, curve_through
from vdnn.step.made_steps import first_save, made_of, with_resident
from vdnn.step.recording import Recording


@strategies.composite
def sizes(draw: strategies.DrawFn) -> tuple[list[float], float]:
    """Two or three sizes in ascending order, and another one."""
    count, scale = draw(strategies.integers(2, 3)), draw(strategies.sampled_from([1.0, 1 / 3, 0.7]))
    known = sorted(draw(strategies.sets(strategies.integers(1, 200), min_size=count, max_size=count)))
    return [one * scale for one in known], draw(strategies.integers(known[0], 300)) * scale


@settings(max_examples=examples(400), deadline=None)
@given(sizes=sizes(), data=strategies.data())
def test_numbers_of_another_size_are_those_of_the_reference(
    sizes: tuple[list[float], float], data: strategies.DataObject
) -> None:
    known, wanted = sizes
    number = strategies.integers(-(1 << 30), 1 << 44) | strategies.integers(0, 3)
    rows = data.draw(strategies.lists(strategies.tuples(*[number for _ in known]), min_size=1, max_size=8))
    amounts = [list(column) for column in zip(*rows, strict=True)]
    assert curve_through(known, wanted).values(amounts) == ReferenceCurve(known, wanted).values(amounts)


@strategies.composite
def grown_steps(draw: strategies.DrawFn) -> tuple[list[Recording], list[float], float]:
    """Two or three steps with the same saves and uses, whose numbers grow more or less with their sizes."""
    recording = draw(any_recomputable_recording(5).flatmap(hosts))
    known, wanted = draw(sizes())
    steps = []
    for size in known:
        factor = round(100 * size)
        lifetimes = tuple(
            replace(
                one,
                nbytes=one.nbytes * factor + draw(strategies.integers(0, 1)),
                recompute=one.recompute
                and replace(one.recompute, compute_ns=one.recompute.compute_ns * factor, extra_bytes=factor),
            )
            for one in recording.lifetimes
        )
        points = tuple(
            replace(
                point,
                compute_ns=point.compute_ns * factor + draw(strategies.integers(0, 2)),
                allocated_bytes=point.allocated_bytes * factor,
                peak_bytes=point.peak_bytes * factor,
                key=point.key and replace(point.key, size=(factor, *point.key.size)),
            )
            for point in recording.points
        )
        steps.append(replace(recording, points=points, lifetimes=lifetimes))
    return steps, known, wanted


def reference_of(steps: Sequence[Recording], known: Sequence[float], wanted: float) -> Recording | None:
    curve = ReferenceCurve(known, wanted)
    keys = [[step.points[one.saves[0]].key for one in step.lifetimes] for step in steps]
    nbytes = [[one.nbytes for one in step.lifetimes] for step in steps]
    stored = curve.stored([[key for key in of_step if key is not None] for of_step in keys], nbytes)

    def more(amounts: Sequence[Sequence[int]]) -> list[int]:
        return stored if list(amounts) == nbytes else curve.values(amounts)

    return made_of(steps, first_save(steps[0]), more)


@settings(max_examples=examples(200), deadline=None)
@given(drawn=grown_steps(), more_bytes=strategies.sampled_from([0, 1000]))
def test_a_step_of_another_size_is_that_of_the_reference(
    drawn: tuple[list[Recording], list[float], float], more_bytes: int
) -> None:
    steps, known, wanted = drawn
    first, resident_bytes = first_save(steps[0]), steps[0].resident_bytes + more_bytes
    native = [recorded_step(one) for one in steps]
    step = curve_through(known, wanted).resized(native, [more_bytes] * len(steps), first.size)
    assert step is not None
    made = ResizedStep(step, steps[-1], first, resident_bytes).recording()
    assert made == reference_of([with_resident(one, resident_bytes) for one in steps], known, wanted)
    assert step.peak_bytes == made.peak_bytes
    read = type(step)(made)
    assert (read.points, read.lifetimes, read.recomputes) == (step.points, step.lifetimes, step.recomputes)


def test_steps_that_save_other_things_make_none() -> None:
    curve = curve_through([1.0, 2.0], 3.0)
    steps = [recorded_step(chain([10, 20])), recorded_step(chain([10, 20, 30]))]
    assert curve.resized(steps, [0, 0], (1,)) is None
    with pytest.raises(InvalidArgumentError, match="more_bytes"):
        curve.resized(steps, [0], (1,))
    with pytest.raises(InvalidArgumentError, match="amounts"):
        curve.values([[1]])
