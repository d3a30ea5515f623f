"""A cell says whether its batch fits, or that it cannot say so."""

from __future__ import annotations

import pytest

from benchmarks.harness.cell_spec import CellSpec, cell_of
from benchmarks.harness.largest_batch import fits
from vdnn.errors import VdnnError
from vdnn.report.cell import FAILED, NOT_RUN, OK, OUT_OF_MEMORY, TIMED_OUT

SPEC = CellSpec("unet", "vdnn-auto", "virtual", "h100", batch=8)


def test_want_of_memory_does_not_fit_however_it_is_said() -> None:
    assert fits(cell_of(SPEC, status=OK))
    for status, said in (
        (OUT_OF_MEMORY, "CUDA out of memory"),
        (FAILED, "budget 3.00 GiB cannot be met: 4.00 GiB are needed"),
        (FAILED, "VdnnError: policy 'vdnn-all' has no plan under 3.00 GiB: the one it makes needs 4.00 GiB"),
    ):
        assert not fits(cell_of(SPEC, status=status, said=said))


@pytest.mark.parametrize("status", [FAILED, NOT_RUN, TIMED_OUT])
def test_what_says_nothing_about_memory_ends_the_search(status: str) -> None:
    result = cell_of(SPEC, status=status, said="its process died by SIGSEGV")
    with pytest.raises(VdnnError, match=f"^{status}, its process died"):
        fits(result)
