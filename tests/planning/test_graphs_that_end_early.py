"""Storages that were away when their graph ended in the middle of a step: their memory is not there behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import vdnn
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.recording import Recording


def recorded() -> Recording:
    """A step that drops one graph, unused, while it makes the next one."""
    with VirtualMachine("titan-x") as machine:
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            dropped = model(torch.zeros(256, 64))
            y = model[:6](torch.zeros(256, 64))
            del dropped
            model[6:](y).square().sum().backward()
    assert session.recording is not None
    return session.recording


def freed_in_a_hook(recording: Recording) -> Recording:
    """The same step, if the graph is freed within the hook of the point at which it ends: what is allocated at that
    point still includes it, and the peak behind it does not."""
    ends = [one.end_point for one in recording.lifetimes if not one.uses]
    end = max(set(ends), key=ends.count)
    freed_bytes = sum(one.nbytes for one in recording.lifetimes if one.end_point == end)
    point = recording.points[end]
    allocated_bytes = point.allocated_bytes + freed_bytes
    later = replace(point, allocated_bytes=allocated_bytes, peak_bytes=max(point.peak_bytes, allocated_bytes))
    points = (*recording.points[:end], later, *recording.points[end + 1 :])
    assert recording.points[end + 1].peak_bytes < allocated_bytes
    return replace(recording, points=points)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_every_budget_above_the_least_has_a_plan(share: float) -> None:
    recording = freed_in_a_hook(recorded())
    least, most = least_bytes(recording), recording.peak_bytes
    budget_bytes = least + int(share * (most - least))
    planned = plan_step(recording, profile_costs(load_profile("titan-x")), budget_bytes, must_fit=True)
    assert planned.timeline.peak_bytes <= budget_bytes
