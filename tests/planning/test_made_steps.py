"""Steps made of recorded ones: one that covers two, one of another size, and one whose micro-batches are even."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import vdnn
from tests.runtime.rigs.networks import perceptron
from tests.runtime.rigs.virtual_training import recording_of
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.made_steps import covering, evened, first_save, resized
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
    return replace(recording, points=points, lifetimes=tuple(lifetimes))


def recording_at(batch: int) -> Recording:
    with VirtualMachine("titan-x") as machine:
        model, x = perceptron(64, 6), torch.randn(batch, 64)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            model(x).square().sum().backward()
    assert session.recording is not None
    return session.recording


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


@pytest.mark.parametrize("batches", [(32, 48, 80), (32, 80, 48), (32, 80, 80)], ids=str)
def test_a_resized_step_is_as_large_as_the_recorded_one_of_its_size(batches: tuple[int, int, int]) -> None:
    one, other, wanted = map(recording_at, batches)
    made = resized(one, other, first_save(wanted), 0)
    assert made is not None
    assert first_save(made) == first_save(wanted)
    assert all(mine.nbytes >= one.nbytes for mine, one in zip(made.lifetimes, wanted.lifetimes, strict=True))
    assert all(mine.peak_bytes >= one.peak_bytes for mine, one in zip(made.points, wanted.points, strict=True))
    assert made.peak_bytes <= (1.3 if batches[-1] > max(batches[:2]) else 1.01) * wanted.peak_bytes


def test_nothing_is_resized_below_both_or_from_one_recording() -> None:
    small, large = recording_at(32), recording_at(48)
    assert resized(small, large, first_save(recording_at(16)), 0) is None
    assert resized(small, small, first_save(large), 0) is None


def micro_batches(*batches: int) -> Recording:
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
            for _ in range(3):
                for batch in batches:
                    model(torch.randn(batch, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    assert session.recording is not None
    return session.recording


def test_even_micro_batches_are_each_as_large_as_the_largest() -> None:
    step, largest = evened(micro_batches(32, 80, 48)), micro_batches(80, 80, 80)
    assert [one.nbytes for one in step.lifetimes] == [one.nbytes for one in largest.lifetimes]
    assert [point.lifetime for point in step.points] == [point.lifetime for point in largest.points]
    assert [(one.saves, one.uses, one.recompute) for one in step.lifetimes] == [
        (one.saves, one.uses, one.recompute) for one in largest.lifetimes
    ]
    assert step.peak_bytes == pytest.approx(largest.peak_bytes, rel=0.01)


def test_a_step_without_micro_batches_stays_as_it_is() -> None:
    recording = recording_at(32)
    assert evened(recording) is recording
