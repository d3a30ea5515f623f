"""The largest batch is found by bisection, wherever the limit is; tests also define what fits."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.harness.cell_spec import FAILED, NOT_RUN, OK, OUT_OF_MEMORY, TIMED_OUT, CellSpec, result_of
from benchmarks.harness.largest_batch import CannotSearch, fits, search

SPEC = CellSpec("unet", "vdnn-auto", "virtual", "h100", batch=8)


@pytest.mark.parametrize("first", [1, 7, 64, 1000])
@pytest.mark.parametrize("edge", [0, 1, 2, 15, 37, 64, 999])
def test_the_edge_is_found_from_wherever_it_begins(first: int, edge: int) -> None:
    tried: list[int] = []

    def try_one(batch: int) -> bool:
        tried.append(batch)
        return batch <= edge

    assert search(try_one, first) == edge
    assert len(tried) == len(set(tried)), "none is tried twice"
    # Doubling or halving reaches the power of two at the limit, then a bisection takes as many steps.
    assert len(tried) <= 2 * max(first, edge, 1).bit_length() + 2


def test_a_search_ends_where_everything_fits() -> None:
    assert search(lambda batch: True, 8, most=100) == 100


def test_want_of_memory_does_not_fit_however_it_is_said() -> None:
    assert fits(result_of(SPEC, status=OK))
    for status, said in (
        (OUT_OF_MEMORY, "CUDA out of memory"),
        (FAILED, "budget 3.00 GiB cannot be met: 4.00 GiB are needed"),
        (FAILED, "VdnnError: policy 'vdnn-all' has no plan under 3.00 GiB: the one it makes needs 4.00 GiB"),
    ):
        assert not fits(result_of(SPEC, status=status, said=said))


@pytest.mark.parametrize("status", [FAILED, NOT_RUN, TIMED_OUT])
def test_what_says_nothing_about_memory_ends_the_search(status: str) -> None:
    result = dataclasses.replace(result_of(SPEC, status=status, said="its process died by SIGSEGV"))
    with pytest.raises(CannotSearch, match=f"at batch 8: {status}, its process died"):
        fits(result)
