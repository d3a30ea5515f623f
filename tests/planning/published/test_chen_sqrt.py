"""chen-sqrt: keeps the end of every segment, and searches for the segment size."""

from __future__ import annotations

import math

import pytest

from tests.planning.policies.steps import made_plan
from tests.planning.published.recomputed_chains import (
    RESIDENT,
    least_peak_bytes,
    recomputed,
    recomputed_chain,
    recomputed_peak_bytes,
)
from tests.planning.recordings import recomputable
from vdnn.planning.published.chen_sqrt import ChenSqrt, segment_sizes
from vdnn.planning.published.recomputed_steps import RecomputedSteps

NINE = recomputed_chain([10] * 9, [5] * 8)


def test_what_a_segment_holds_is_given_up_and_the_next_is_kept() -> None:
    plan = made_plan(ChenSqrt(segment_bytes=20), NINE)
    assert recomputed(plan) == {1, 2, 4, 5, 7, 8}
    # The ends 0, 3 and 6 are kept, and one segment of two storages is recomputed at once.
    assert recomputed_peak_bytes(NINE, plan) == RESIDENT + 3 * 10 + 2 * 10


def test_what_cannot_be_recomputed_ends_a_segment() -> None:
    recording = recomputed_chain([10] * 9, [5, 0, 5, 5, 5, 5, 5, 5])
    assert recomputed(made_plan(ChenSqrt(segment_bytes=20), recording)) == {1, 3, 4, 6, 7}


def test_a_segment_is_what_a_recompute_brings_with_it_on_all_its_ways() -> None:
    """The last storage is recomputed from two branches, which together exceed the bytes of a segment."""
    recording = recomputed_chain([10] * 4, [5])
    recording = recomputable(recording, 2, (0,), 5)
    recording = recomputable(recording, 3, (1, 2), 5)
    assert recomputed(made_plan(ChenSqrt(segment_bytes=20), recording)) == {1, 2}
    assert recomputed(made_plan(ChenSqrt(segment_bytes=30), recording)) == {1, 2, 3}


def test_sizes_lie_around_the_root_of_all_times_the_largest() -> None:
    sizes = segment_sizes(RecomputedSteps(NINE))
    assert math.ceil(math.sqrt(80 * 10)) in sizes
    assert sizes[0] <= math.ceil(10 * 2 ** (1 / 3))
    assert sizes[-1] >= 80


@pytest.mark.parametrize("count", [4, 9, 16, 25, 100])
def test_like_storages_take_two_roots_of_them(count: int) -> None:
    recording = recomputed_chain([10] * count, [5] * (count - 1))
    plan = made_plan("chen-sqrt", recording)
    assert recomputed_peak_bytes(recording, plan) <= RESIDENT + 10 * 2 * math.isqrt(count)


@pytest.mark.parametrize(("count", "more"), [(2, 0), (3, 0), (5, 0), (7, 0), (9, 10)])
def test_of_a_chain_of_like_storages_hardly_anything_needs_less(count: int, more: int) -> None:
    """The policy's segments are equal. A plan with one storage less needs longer segments at the beginning of the
    forward pass."""
    recording = recomputed_chain([10] * count, [5] * (count - 1))
    assert recomputed_peak_bytes(recording, made_plan("chen-sqrt", recording)) == least_peak_bytes(recording) + more


def test_under_a_budget_the_size_that_costs_least() -> None:
    # With segments of one storage, every second one is recomputed, in 5 ns each; 0, 2, 4, 6 and 8 are kept.
    plan = made_plan("chen-sqrt", NINE, RESIDENT + 60)
    assert recomputed(plan) == {1, 3, 5, 7}


def test_where_no_size_fits_it_is_the_least_memory_over_the_budget() -> None:
    plan = made_plan("chen-sqrt", NINE, RESIDENT + 40)
    assert recomputed_peak_bytes(NINE, plan) == RESIDENT + 50
    assert plan.budget_bytes == RESIDENT + 40
