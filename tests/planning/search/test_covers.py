"""A cover frees enough memory in every interval, no gap of it can be left out, and each order makes its own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recording, chain
from tests.planning.reference.covers import order_near, orders_of_leaving_out
from vdnn import _C
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.search.step_model import make_step_model
from vdnn.step.recording import Recording

COSTS = LinkCosts(1e9, 1e9, 2e9, 0)


def model_of(recording: Recording, costs: LinkCosts = COSTS) -> _C.StepModel:
    return make_step_model(recording, gaps_of(recording), costs)


def peak_with(recording: Recording, model: _C.StepModel, flags: bytes) -> int:
    """The peak if every gap with a flag is used as a whole."""
    gaps = gaps_of(recording)
    return model.peak_bytes([(index, gap.release_point, -1) for index, gap in enumerate(gaps) if flags[index]])


@settings(max_examples=examples(300), deadline=None)
@given(recording=any_recording(7), costs=LINKS, data=strategies.data())
def test_every_gap_of_a_cover_is_needed(recording: Recording, costs: LinkCosts, data: strategies.DataObject) -> None:
    gaps, model = gaps_of(recording), model_of(recording, costs)
    budget = data.draw(strategies.integers(least_bytes(recording), recording.peak_bytes + 1))
    order = data.draw(strategies.permutations(range(len(gaps))))
    cover = model.cover(order, budget)
    assert model.evaluate(cover, budget) is not None
    assert peak_with(recording, model, cover) <= budget
    for index in range(len(gaps)):
        if cover[index]:
            without = bytes([flag and number != index for number, flag in enumerate(cover)])
            assert peak_with(recording, model, without) > budget


@settings(max_examples=examples(100), deadline=None)
@given(recording=any_recording(7), costs=LINKS, seed=strategies.integers(0, 1000))
def test_orders_have_every_gap_once(recording: Recording, costs: LinkCosts, seed: int) -> None:
    gaps, model, draw = gaps_of(recording), model_of(recording, costs), random.Random(seed)
    compute_ns = [point.compute_ns for point in recording.points]
    for order in orders_of_leaving_out(compute_ns, gaps, costs):
        assert sorted(order) == list(range(len(gaps)))
        cover = model.cover(order, recording.peak_bytes)
        assert sorted(order_near(cover, draw)) == list(range(len(gaps)))


def test_what_the_order_begins_with_is_left_out_first() -> None:
    recording = chain([10, 10, 10, 10])
    gaps, model = gaps_of(recording), model_of(recording)
    budget = recording.peak_bytes - 10
    assert least_bytes(recording) <= budget
    covers = {tuple(model.cover([first, *range(len(gaps))], budget)) for first in range(len(gaps))}
    for first in range(len(gaps)):
        assert model.cover([first, *range(len(gaps))], budget)[first] == 0
    assert len(covers) > 1


def test_a_cover_near_another_leaves_out_mostly_the_same() -> None:
    recording = chain([10] * 100)
    gaps, model, draw = gaps_of(recording), model_of(recording), random.Random(0)
    budget = (least_bytes(recording) + recording.peak_bytes) // 2
    cover = model.cover(random.Random(1).sample(range(len(gaps)), len(gaps)), budget)
    near = [model.cover(order_near(cover, draw), budget) for _ in range(20)]
    differing = [sum(one != other for one, other in zip(cover, found, strict=True)) for found in near]
    assert 0 < max(differing) <= len(gaps) // 4


def test_nonsense_is_refused() -> None:
    recording = chain([10, 20, 30])
    for order in ([-1], [1000]):
        with pytest.raises(InvalidArgumentError, match="order"):
            model_of(recording).cover(order, 100)


def test_below_the_least_budget_a_cover_has_every_gap_that_is_needed() -> None:
    recording = chain([10, 20, 30])
    model, every = model_of(recording), range(len(gaps_of(recording)))
    assert model.evaluate(model.cover(list(every), 1), 1) is None
