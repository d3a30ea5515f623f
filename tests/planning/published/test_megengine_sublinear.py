"""megengine-sublinear: thresholds, generations, and spare memory that is spent on time."""

from __future__ import annotations

import pytest

from tests.planning.policies.steps import made_plan, with_lifetimes
from tests.planning.published.recomputed_chains import (
    RESIDENT,
    least_peak_bytes,
    recomputed,
    recomputed_chain,
    recomputed_peak_bytes,
)
from tests.planning.recordings import recomputable
from vdnn.planning.published.megengine_sublinear import MegengineSublinear, SublinearConfig, worth_discarding
from vdnn.planning.published.recomputed_steps import RecomputedSteps
from vdnn.planning.published.save_blocks import SaveBlocks
from vdnn.step.recording import Recording

MIB = 1 << 20
NINE = recomputed_chain([10] * 9, [5] * 8)


def uneven(count: int = 24) -> Recording:
    return recomputed_chain([10 + 7 * (index % 5) for index in range(count)], [5] * (count - 1))


def test_a_block_ends_where_its_bytes_reach_the_threshold() -> None:
    blocks = SaveBlocks(RecomputedSteps(recomputed_chain([10, 20, 5, 30, 10], [5] * 4)))
    assert blocks.cuts_of(30) == {1, 3}
    assert blocks.cuts_of(31) == {2, 4}
    assert blocks.cuts_of(1000) == set()


def test_what_comes_back_at_once_is_not_worth_it() -> None:
    """One operation uses the last three storages. The second is saved two points before its uses."""
    recording = recomputed_chain([10] * 4, [5] * 3)
    joint = with_lifetimes(recording, {index: {"read": (7,)} for index in (1, 2, 3)})
    assert worth_discarding(RecomputedSteps(recording)) == [1, 2]
    assert worth_discarding(RecomputedSteps(joint)) == [1]
    used = {one: joint.lifetimes[one].uses[0] - joint.lifetimes[one].saves[0] for one in (1, 2, 3)}
    assert used == {1: 5, 2: 3, 3: 1}, "the operation has three inputs"


def test_it_finds_the_least_memory_of_even_blocks() -> None:
    plan = made_plan("megengine-sublinear", NINE)
    assert recomputed_peak_bytes(NINE, plan) == RESIDENT + 50
    assert least_peak_bytes(NINE) == RESIDENT + 40, "the first block of all is longer there"


def test_generations_find_what_no_threshold_makes() -> None:
    grid = made_plan(MegengineSublinear(), NINE)
    evolved = made_plan(MegengineSublinear(SublinearConfig(genetic_nr_iter=20)), NINE)
    assert recomputed_peak_bytes(NINE, evolved) == least_peak_bytes(NINE) < recomputed_peak_bytes(NINE, grid)


@pytest.mark.parametrize("iterations", [1, 5, 40])
def test_generations_never_lose_what_was_found(iterations: int) -> None:
    recording = uneven()
    grid = recomputed_peak_bytes(recording, made_plan(MegengineSublinear(), recording))
    policy = MegengineSublinear(SublinearConfig(genetic_nr_iter=iterations, genetic_pool_size=5))
    evolved = made_plan(policy, recording)
    assert recomputed_peak_bytes(recording, evolved) <= grid
    assert made_plan(policy, recording) == evolved, "the draws are seeded"


def test_more_thresholds_are_never_worse() -> None:
    recording = uneven()
    peaks = [
        recomputed_peak_bytes(recording, made_plan(MegengineSublinear(SublinearConfig(thresh_nr_try=tries)), recording))
        for tries in (0, 10)
    ]
    assert peaks[1] <= peaks[0]


def test_under_a_budget_the_dearest_stays() -> None:
    recording = recomputed_chain([10] * 9, [5, 5, 5, 900, 5, 5, 5, 5])
    least = recomputed(made_plan("megengine-sublinear", recording, RESIDENT + 50))
    assert 4 in least
    spent = made_plan("megengine-sublinear", recording, RESIDENT + 60)
    assert 4 not in recomputed(spent)
    assert recomputed_peak_bytes(recording, spent) <= RESIDENT + 60


def test_memory_below_its_bound_is_spent_too() -> None:
    recording = recomputed_chain([MIB] * 9, [5] * 8)
    free = recomputed(made_plan("megengine-sublinear", recording))
    bound = recomputed(made_plan(MegengineSublinear(SublinearConfig(lb_memory_mb=8)), recording))
    assert len(bound) < len(free)


def test_the_recomputes_of_a_block_read_nothing_that_is_recomputed_in_another() -> None:
    recording = recomputable(NINE, 6, (5, 1), 5)
    inside = SaveBlocks(RecomputedSteps(recording)).inside({3})
    assert inside == {2, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("thresh_nr_try", -1, 0), ("genetic_pool_size", 0, 1), ("lb_memory_mb", 1.5, 0), ("num_worker", 0, 1)],
)
def test_a_configuration_that_makes_no_sense_is_refused(name: str, value: object, least: int) -> None:
    with pytest.raises(ValueError, match=f"expected {name} to be an integer of at least {least}, got {value}"):
        SublinearConfig(**{name: value})  # type: ignore[arg-type]


def test_the_configuration_is_megengines() -> None:
    assert SublinearConfig() == SublinearConfig(
        thresh_nr_try=10, genetic_nr_iter=0, genetic_pool_size=20, lb_memory_mb=0, num_worker=1
    )
