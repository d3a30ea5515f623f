"""The least memory of a training, what fits its host, and its largest model."""

from __future__ import annotations

import pytest

from tests.planning.training.random_trainings import random_training
from tests.planning.training.test_training_cycles import GB, unit
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.least_placement import (
    fitting_host_bytes,
    fitting_placement,
    largest_layers,
    least_training_bytes,
    with_layers,
)
from vdnn.planning.training.placement import Placement, UnitPlacement
from vdnn.planning.training.training import Training

BLOCKS = (1, 2, 3)
MODEL = Training("five units", tuple(unit(name) for name in ("before", "a", "b", "c", "after")))


@pytest.mark.parametrize("seed", range(20))
def test_more_of_the_device_needs_less_of_the_host(seed: int) -> None:
    training = random_training(seed, 4).training
    least = least_training_bytes(training)
    kept = max(cycle_of(training, Placement((UnitPlacement(),) * 4)).needed_bytes)
    needed = [fitting_host_bytes(training, least + (kept - least) * part // 4) for part in range(5)]
    assert needed == sorted(needed, reverse=True)
    placement = fitting_placement(training, least, needed[0])
    assert placement is not None
    assert max(cycle_of(training, placement).needed_bytes) <= least
    assert fitting_placement(training, least - 1, needed[0]) is None


def test_layers_are_repeated_or_left_out_in_the_middle() -> None:
    more = with_layers(MODEL, BLOCKS, 5)
    assert [one.name for one in more.units] == ["before", "a", "b", "b (repeated 1)", "b (repeated 2)", "c", "after"]
    assert [one.name for one in with_layers(MODEL, BLOCKS, 1).units] == ["before", "c", "after"]
    assert with_layers(MODEL, BLOCKS, 3) == MODEL


@pytest.mark.parametrize("host_gb", [20, 60])
def test_the_largest_model_fits_and_one_layer_more_does_not(host_gb: int) -> None:
    budget_bytes = 12 * GB
    layers = largest_layers(MODEL, BLOCKS, budget_bytes, host_gb * GB)
    fits = [
        fitting_placement(with_layers(MODEL, BLOCKS, count), budget_bytes, host_gb * GB) is not None
        for count in range(1, layers + 2)
    ]
    assert fits == [True] * layers + [False]
