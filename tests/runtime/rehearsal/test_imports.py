"""A library that is imported for the first time within a rehearsal keeps real tensors, and steps run as predicted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vdnn

WIDTH = 512
LIBRARY = f"import torch\nWEIGHTS = torch.full(({WIDTH},), 0.5)\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "imported_within_a_rehearsal"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


class _Scaled(nn.Module):
    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = weights
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.weights


@pytest.mark.parametrize("is_used", [True, False])
def test_constants_of_a_library_imported_in_a_rehearsal_are_real(library: str, is_used: bool) -> None:
    def make(batch: int) -> tuple[nn.Module, torch.Tensor]:
        weights = __import__(library).WEIGHTS
        return _Scaled(weights if is_used else torch.ones(WIDTH)), torch.empty(batch, WIDTH)

    report = vdnn.plan(make, 4096, hardware="a100-80", budget="min")
    assert report.executed is not None
    assert report.executed.peak_bytes == report.planned.timeline.peak_bytes
    assert report.executed.step_ns == report.planned.timeline.step_ns
    assert type(sys.modules[library].WEIGHTS) is torch.Tensor
    assert sys.modules[library].WEIGHTS.tolist() == [0.5] * WIDTH
