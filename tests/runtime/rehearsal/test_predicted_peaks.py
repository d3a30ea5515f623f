"""A predicted peak is what the run takes, or an upper bound where a tensor's last holder drops it between two hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn
from vdnn.step.plan import Action

WIDTH = 256


class Gated(nn.Module):
    """The perceptron of Llama: `gate` is dropped by its caller while the product with `up` is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


@pytest.fixture(scope="module")
def report() -> vdnn.PlanReport:
    def make(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(*(Gated() for _ in range(4))), torch.randn(batch, 128, WIDTH)

    return vdnn.plan(make, 4, hardware="p100", budget="min", min_bytes="64KiB")


def test_a_run_is_under_its_predicted_peak_only_where_a_discarded_tensor_loses_its_last_holder(
    report: vdnn.PlanReport,
) -> None:
    planned, executed, recording = report.planned.timeline, report.executed, report.planned.recording
    assert executed is not None
    assert executed.step_ns == planned.step_ns
    dropped = [
        (lifetime.free_point, lifetime.nbytes)
        for lifetime, action in zip(recording.lifetimes, report.planned.plan.lifetimes, strict=True)
        if action.action is not Action.KEEP
    ]
    under = 0
    for foreseen, found in zip(planned.marks, executed.marks, strict=True):
        assert found.allocated_bytes == foreseen.allocated_bytes
        here = sum(nbytes for point, nbytes in dropped if point == foreseen.point)
        assert 0 <= foreseen.peak_bytes - found.peak_bytes <= here
        under += found.peak_bytes < foreseen.peak_bytes
    assert under > 0
