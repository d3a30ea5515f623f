"""Steps that cover two recorded ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.runtime.rigs.virtual_training import recording_of
from vdnn.step.made_steps import covering, with_whole_peaks
from vdnn.step.recording import Recording


def grown(recording: Recording, grows: list[bool]) -> Recording:
    """The step with some lifetimes twice as large, and nothing else."""
    changes = [0] * (len(recording.points) + 1)
    lifetimes = []
    for one, is_larger in zip(recording.lifetimes, grows, strict=True):
        more_bytes = one.nbytes * is_larger
        changes[one.saves[0]] += more_bytes
        changes[one.end_point] -= more_bytes
        lifetimes.append(replace(one, nbytes=one.nbytes + more_bytes))
    points = tuple(
        replace(point, allocated_bytes=point.allocated_bytes + more, peak_bytes=point.peak_bytes + more)
        for point, more in zip(recording.points, itertools.accumulate(changes), strict=False)
    )
    return replace(recording, points=with_whole_peaks(points), lifetimes=tuple(lifetimes))


@pytest.mark.parametrize("model", ["chain", "perceptron", "resnet", "join"])
def test_steps_that_are_large_in_different_places_are_covered_by_one_that_is_large_in_both(model: str) -> None:
    recording = recording_of(model)
    number = len(recording.lifetimes)
    odd, even = ([index % 2 == rest for index in range(number)] for rest in (1, 0))
    larger = grown(recording, [True] * number)
    assert covering(recording, recording) == recording
    assert covering(recording, larger) == covering(larger, recording) == larger
    assert covering(grown(recording, odd), grown(recording, even)) == larger


def test_steps_of_another_order_have_none() -> None:
    assert covering(recording_of("chain"), recording_of("perceptron")) is None
