"""Steps of sizes that were not recorded, made of recorded ones: from three or two on a line of sizes, or from one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vdnn
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.steps.resized_steps import guessed, lines_through, resized
from vdnn.runtime.steps.size_model import RecordedSizes
from vdnn.step.made_steps import first_save
from vdnn.step.recording import Recording


class Attention(nn.Module):
    """One layer, whose maps grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed, self.output = nn.LayerNorm(48), nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.mixed(self.norm(x)).chunk(3, -1)
        return self.output((queries @ keys.transpose(1, 2)).softmax(-1) @ values).relu()  # type: ignore[no-any-return]


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())


def recorded(kind: type[nn.Module], *size: int) -> Recording:
    """One training step on an input of this size."""
    with VirtualMachine("titan-x") as machine:
        model, x = kind(), torch.zeros(size)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            model(x).square().sum().backward()
    assert session.recording is not None
    return session.recording


@functools.cache
def text(length: int, batch: int = 4) -> Recording:
    return recorded(Attention, batch, length, 48)


@functools.cache
def image(side: int) -> Recording:
    return recorded(Images, 4, 3, side, side)


def made_from(recordings: list[Recording], wanted: Recording) -> Recording | None:
    first = first_save(wanted)
    lines = lines_through(first.size, {first_save(one).size: one for one in recordings}, in_part=True)
    made = resized(lines[0], first, 0) if lines else None
    return None if made is None else made.recording()


@pytest.mark.parametrize("size", [128, 256, 512])
@pytest.mark.parametrize("of_size", [text, image], ids=["texts", "images"])
def test_three_steps_tell_every_other_one(of_size: Callable[[int], Recording], size: int) -> None:
    wanted = of_size(size)
    made = made_from([of_size(each) for each in (64, 96, 160)], wanted)
    assert made is not None
    assert first_save(made) == first_save(wanted)
    assert [one.nbytes for one in made.lifetimes] == [one.nbytes for one in wanted.lifetimes]
    assert made.peak_bytes == pytest.approx(wanted.peak_bytes, rel=0.002)
    assert made.compute_ns == pytest.approx(wanted.compute_ns, rel=0.05)
    recomputes = [(one.recompute, other.recompute) for one, other in zip(made.lifetimes, wanted.lifetimes, strict=True)]
    assert all((one is None) == (other is None) for one, other in recomputes)
    for one, other in recomputes:
        if one is not None and other is not None:
            assert one.extra_bytes == pytest.approx(other.extra_bytes, rel=0.01)


@pytest.mark.parametrize("length", [80, 192, 320])
def test_two_steps_tell_the_storages_and_no_less_than_the_rest(length: int) -> None:
    wanted = text(length)
    made = made_from([text(64), text(96)], wanted)
    assert made is not None
    assert [one.nbytes for one in made.lifetimes] == [one.nbytes for one in wanted.lifetimes]
    assert all(mine.peak_bytes >= one.peak_bytes for mine, one in zip(made.points, wanted.points, strict=True))
    assert made.peak_bytes <= 1.3 * wanted.peak_bytes


class Masked(Attention):
    """Saves something more from a length on, as where a mask is too small to be managed at shorter ones."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.sin() if x.shape[1] > 80 else y


def test_steps_that_save_other_things_do_not_keep_the_rest_from_telling() -> None:
    """Else a longer text than all before had no plan of its own, and its step was up to 13 % over its budget."""
    short, *longer = (recorded(Masked, 4, length, 48) for length in (64, 96, 160))
    wanted = recorded(Masked, 4, 256, 48)
    made = made_from([short, *longer], wanted)
    assert made is not None
    assert [one.nbytes for one in made.lifetimes] == [one.nbytes for one in wanted.lifetimes]
    assert made_from([short, longer[0]], wanted) is None
    sizes = RecordedSizes(short, has_own_recomputes=True)
    for one in longer:
        sizes.note(one, has_own_recomputes=True)
    told = sizes.prediction_for(first_save(wanted), [], is_served=False)
    assert told is not None
    assert [step.is_guess for step in told.steps(lambda _: -1)] == [False, False]


@pytest.mark.parametrize("fitting", [100, 112, 113, 140, 159, 160, 200])
def test_the_step_that_is_planned_is_the_largest_that_fits(fitting: int) -> None:
    """A longer one does not. Its plan keeps everything, and serves all smaller steps."""
    sizes = RecordedSizes(text(64), has_own_recomputes=True)
    sizes.note(text(96), has_own_recomputes=True)
    sizes.note(text(160), has_own_recomputes=True)
    first = first_save(text(100))
    told = sizes.prediction_for(first, [], is_served=False)
    assert told is not None
    line = told.lines[0]
    resident_bytes = max(one.resident_bytes for one in line.recorded.values())
    steps = [resized(line, first, position, resident_bytes) for position in range(61)]
    peaks = {100 + position: one.step.peak_bytes for position, one in enumerate(steps) if one is not None}
    budget_bytes = peaks.get(fitting, 2 * peaks[160])
    asked: list[_C.RecordedStep] = []

    def room(made: _C.RecordedStep) -> int:
        asked.append(made)
        return budget_bytes - made.peak_bytes

    (step,) = told.steps(room)
    length = first_save(step.recording).size[1]
    assert step.recording.peak_bytes == peaks[length] <= budget_bytes
    assert length == 160 or peaks[length + 1] > budget_bytes
    assert len(asked) <= 10  # of 61


@pytest.mark.parametrize("length", [112, 160, 320])
def test_no_peak_of_a_made_step_is_below_what_is_allocated_before_it(length: int) -> None:
    """Else plans would fit where they are searched for, and not where they are simulated."""
    first = first_save(text(length))
    for made in (made_from([text(64), text(96)], text(length)), guessed(text(96), first)):
        assert made is not None
        assert all(after.peak_bytes >= before.allocated_bytes for before, after in itertools.pairwise(made.points))


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        (lambda: text(64), lambda: text(256)),
        (lambda: text(64, batch=4), lambda: text(48, batch=12)),
        (lambda: text(128), lambda: text(64)),
        (lambda: image(64), lambda: image(192)),
    ],
    ids=["longer", "longer and more", "shorter", "images"],
)
def test_one_step_tells_a_guess(one: Callable[[], Recording], wanted: Callable[[], Recording]) -> None:
    assert_guessed(one(), wanted())


def assert_guessed(one: Recording, wanted: Recording) -> None:
    guess = guessed(one, first_save(wanted))
    assert first_save(guess) == first_save(wanted)
    assert [mine.nbytes for mine in guess.lifetimes] == [other.nbytes for other in wanted.lifetimes]
    # The end of a step is the optimizer's, whose memory does not grow: here it is that of the last gradients.
    peaks = [max(point.peak_bytes for point in made.points[:-1]) for made in (guess, wanted)]
    assert 0.98 * peaks[1] <= peaks[0] <= 1.35 * peaks[1]


def test_a_guess_takes_channels_for_no_texts() -> None:
    """Both are eight before; then there are three texts."""
    before, wanted = recorded(Images, 8, 3, 64, 64), recorded(Images, 3, 3, 64, 64)
    guess = guessed(before, first_save(wanted))
    pairs = zip(guess.lifetimes, wanted.lifetimes, strict=True)
    assert [mine.nbytes for mine, other in pairs if mine.nbytes != other.nbytes] == [12, 12]  # not saved by channels


def test_a_step_below_all_recorded_ones_is_not_made() -> None:
    assert made_from([text(64), text(96)], text(32)) is None


def test_recorded_steps_that_grew_in_another_proportion_are_on_no_line() -> None:
    assert made_from([text(64, batch=4), text(96, batch=3)], text(128, batch=4)) is None
    assert made_from([text(64)], text(128)) is None


def test_no_line_leads_through_steps_whose_first_save_is_a_number() -> None:
    assert lines_through((), {(): text(32)}) == []
