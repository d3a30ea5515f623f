"""A step that is recorded while it follows a plan: the recording is that of the step with everything kept."""

from __future__ import annotations

import torch
from torch import nn

import vdnn
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.recording import Recording

WIDTH = 64


def recorded(rows: list[int], *, policy: str, budget: str | None) -> tuple[Recording, bool]:
    """The last recording of these steps, and whether the last step recomputed."""
    torch.manual_seed(0)
    with VirtualMachine("h100", fake=False) as machine:  # recipes are tried on real tensors only
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vdnn.offload(policy, budget=budget, device=machine, min_bytes=0, measure=budget is None) as session:
            for count in rows:
                recomputes = session.counters.recomputes
                model(torch.randn(count, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert session.recording is not None
    return session.recording, session.counters.recomputes > recomputes


def test_storages_that_are_recomputed_for_a_trial_count_as_absent_after_it() -> None:
    with_recomputes, has_recomputed = recorded([512, 512, 256, 768], policy="auto", budget="2MiB")
    kept, _ = recorded([768, 768], policy="keep", budget=None)
    assert has_recomputed
    assert with_recomputes.managed_bytes == kept.managed_bytes
    assert with_recomputes.peak_bytes == kept.peak_bytes
