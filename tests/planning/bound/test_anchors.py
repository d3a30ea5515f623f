"""The anchors of steps with too many intervals, and the bytes of whole storages that are absent at an anchor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.plans.plan_matrix import without_recomputes
from vdnn.hardware import load_profile
from vdnn.planning.bound.lower_bound import lower_bound
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of

LAYERS = 60


def convolutions(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Equal convolutions, like those within a group of VGG-416."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers), torch.empty(batch, 64, 56, 56)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "is_slower"), [(0.0, True), (0.25, False)])
def test_many_layers_alike_are_certified_at_their_least_memory(share: float, is_slower: bool) -> None:
    """There is room for the map in use and almost for another one, so every reload waits for the previous use. With a
    few evenly spaced anchors, the bound would let many copies between two anchors overlap with compute, and would let
    parts of maps be reloaded early although no whole map fits. A third of the step would stay uncertified."""
    profile = load_profile("titan-x")
    recording = without_recomputes(rehearse(subject_of(convolutions, 128), profile).recording)
    costs = profile_costs(profile)
    least = least_bytes(recording)
    budget_bytes = least + round((recording.peak_bytes - least) * share)
    planned = plan_step(recording, costs, budget_bytes, "auto-offload")
    step_ns = planned.timeline.step_ns
    bound = lower_bound(recording, costs, budget_bytes, anchors=100, enough_ns=round(0.98 * step_ns))
    assert planned.fits
    assert (planned.slowdown > 1.5) is is_slower
    assert bound.gap(step_ns) < 0.01
