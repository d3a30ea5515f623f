"""The training of `make demo` on a GPU. The test does not draw, so it does not need matplotlib."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.demo.devices import CudaDevice
from benchmarks.demo.training import GPU_SIZE, train_side_by_side
from benchmarks.demo.wording import verdict
from tests.conftest import require_cuda


@pytest.mark.gpu
def test_on_a_gpu_both_runs_are_equal_and_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cuda()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = train_side_by_side(CudaDevice, replace(GPU_SIZE, steps=4))
    assert found.is_right, verdict(found)
