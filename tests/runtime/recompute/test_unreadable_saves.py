"""Torch 2.8 does not return the objects of a pack hook: less can be recomputed there, but plans are still made."""

from __future__ import annotations

import pytest
import torch

import vdnn
from vdnn.runtime.recompute import saved_values


def layers(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    blocks = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    return torch.nn.Sequential(*blocks), torch.randn(batch, 512)


def recomputable() -> int:
    report = vdnn.plan(layers, 4096, hardware="titan-x", budget="min")
    assert report.executed is not None
    assert report.executed.peak_bytes <= report.planned.plan.budget_bytes
    return sum(lifetime.recompute is not None for lifetime in report.planned.recording.lifetimes)


def test_what_cannot_be_read_is_not_recomputed_and_the_rest_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    with_reading = recomputable()
    monkeypatch.setattr(saved_values, "_IS_READABLE", False)
    assert 0 < recomputable() < with_reading
