"""The largest batch is found with few trials, wherever the limit is and whatever a trial says of it."""

from __future__ import annotations

import math

import pytest

from vdnn.errors import VdnnError
from vdnn.runtime.rehearsal.largest_batch import CannotSearch, find_largest_batch


@pytest.mark.parametrize("first", [1, 7, 64, 1000])
@pytest.mark.parametrize("edge", [0, 1, 2, 15, 37, 64, 999])
def test_trials_that_only_say_whether_a_batch_fits_are_bisected(first: int, edge: int) -> None:
    tried: list[int] = []

    def spare_bytes(batch: int) -> float:
        tried.append(batch)
        return math.inf if batch <= edge else -math.inf

    assert find_largest_batch(spare_bytes, first=first) == edge
    assert len(tried) == len(set(tried)), "none is tried twice"
    # Doubling or halving reaches the power of two at the limit, then a bisection takes as many steps.
    assert len(tried) <= 2 * max(first, edge, 1).bit_length() + 2


@pytest.mark.parametrize("first", [1, 16, 5000])
@pytest.mark.parametrize("budget_bytes", [0, 99, 1100, 1101, 9037, 9100, 50_000, 1_234_567])
def test_a_line_through_the_bytes_saves_trials(budget_bytes: int, first: int) -> None:
    def needs(batch: int) -> int:
        return max(100 * batch + 1000, 37 * batch + 9000)  # a kink, as if the peak moved to another layer

    tried: list[int] = []

    def spare_bytes(batch: int) -> int:
        tried.append(batch)
        return budget_bytes - needs(batch)

    found = find_largest_batch(spare_bytes, first=first)
    assert found == 0 or needs(found) <= budget_bytes
    assert needs(found + 1) > budget_bytes
    assert len(tried) == len(set(tried)), "none is tried twice"
    assert len(tried) <= 12


def test_memory_in_steps_does_not_mislead_the_line() -> None:
    tried: list[int] = []

    def spare_bytes(batch: int) -> int:
        tried.append(batch)
        return 1000 - batch // 64 * 64

    assert find_largest_batch(spare_bytes, first=3) == 1023
    assert len(tried) <= 30


def test_a_search_ends_where_everything_fits() -> None:
    assert find_largest_batch(lambda batch: math.inf, first=8, most=100) == 100
    assert find_largest_batch(lambda batch: 1000 - batch, first=200, most=100) == 100


def test_each_trial_is_announced() -> None:
    said: list[str] = []
    assert find_largest_batch(lambda batch: 3 - batch, first=2, on_progress=said.append) == 3
    assert said == ["trying batch 2", "trying batch 4", "trying batch 3"]


def test_a_failed_trial_ends_the_search_with_its_batch() -> None:
    def spare_bytes(batch: int) -> float:
        if batch > 20:
            raise VdnnError("the process died by SIGSEGV.")
        return math.inf

    with pytest.raises(CannotSearch, match="^at batch 32: the process died by SIGSEGV"):
        find_largest_batch(spare_bytes, first=8)
