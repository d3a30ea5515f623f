"""Graphs that are used by several backwards, under a budget: what came back for the first one need not stay for the
next."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from vdnn.runtime.machine.virtual_machine import VirtualMachine

MIB = 2**20


class Ran:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peaks: list[int] = []  # of each step
        self.gradients: list[bytes] = []
        self.report = ""


def used_twice(model: nn.Module, x: torch.Tensor, losses: list[float]) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    losses.append(loss.item())


def through_windows(model: nn.Module, x: torch.Tensor, losses: list[float]) -> None:
    """Truncated backpropagation through time: each window's backward goes through the window before, too."""
    hidden: torch.Tensor | None = None
    for window in x.split(64):
        now = model(window if hidden is None else window + hidden)
        loss = now.square().mean()
        loss.backward(retain_graph=True)
        losses.append(loss.item())
        hidden = now if hidden is None else now.detach()


def run(program: Any, budget_bytes: int | None, steps: int) -> Ran:
    ran = Ran()
    torch.manual_seed(0)
    with VirtualMachine("rtx-4090", fake=False) as machine, contextlib.ExitStack() as sessions:
        layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
        model = nn.Sequential(*layers)
        session = None
        if budget_bytes is not None:
            session = sessions.enter_context(vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0))
        for number in range(steps):
            machine.reset_peak()
            program(model, torch.full((1024, 256), 0.1 * (number + 1)), ran.losses)
            ran.peaks.append(machine.peak_bytes)
            ran.gradients += [one.grad.numpy().tobytes() for one in model.parameters() if one.grad is not None]
            model.zero_grad()
            if session is not None:
                session.step()
        ran.report = "" if session is None else session.report()
    return ran


def test_the_first_backward_of_a_graph_leaves_room_in_a_step_without_a_plan() -> None:
    plain = run(used_twice, None, 1)
    assert plain.peaks[0] > 28 * MIB
    ran = run(used_twice, 15 * MIB, 1)
    assert ran.losses == plain.losses
    assert ran.gradients == plain.gradients
    assert ran.peaks[0] < 17 * MIB, "28 MiB if all that came back stays"
    assert run(used_twice, 2 * plain.peaks[0], 1).peaks == plain.peaks, "where there is room, it stays"


@pytest.mark.parametrize(
    ("program", "share"), [(used_twice, 0.9), (used_twice, 0.5), (through_windows, 0.9), (through_windows, 0.75)]
)
def test_later_steps_follow_a_plan_within_the_budget(program: Any, share: float) -> None:
    plain = run(program, None, 4)
    budget_bytes = int(share * plain.peaks[-1])
    ran = run(program, budget_bytes, 4)
    assert ran.losses == plain.losses
    assert ran.gradients == plain.gradients
    assert max(ran.peaks[1:]) <= budget_bytes
    assert "steps: 3 of 4 followed a plan" in ran.report
