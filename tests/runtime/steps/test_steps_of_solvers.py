"""Steps of a solver that evaluates its network another number of times in each: more comes between planned saves."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import vdnn
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.steps import plan_book

EVALUATIONS = [8, 8, 9, 9, 10, 10, 11, 11, 12, 12]


def trained(evaluations: list[int], budget: int | None = None) -> tuple[list[int], list[torch.Tensor], int]:
    """The peaks of the steps, the parameters, and what the session learned to leave free."""
    with VirtualMachine("rtx-4090", fake=False) as machine:
        torch.manual_seed(0)
        field = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        optimizer = torch.optim.SGD(field.parameters(), 0.01)
        begin, peaks = torch.randn(200, 2), []
        session = None if budget is None else vdnn.offload(budget=budget, device=machine, min_bytes="1KiB")
        with session or contextlib.nullcontext():
            for count in evaluations:
                machine.reset_peak()
                states = [begin]
                for _ in range(count):
                    slope = field(states[-1] ** 3)
                    states.append(states[-1] + 0.1 * (slope + field((states[-1] + 0.1 * slope) ** 3)))
                (torch.stack(states) - 1.0).abs().mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                del states, slope
                if session is not None:
                    session.step()
                peaks.append(machine.peak_bytes)
        learned_bytes = 0 if session is None else session._engine.steps._plans.unforeseen_bytes
        return peaks, [one.detach().clone() for one in field.parameters()], learned_bytes


def test_what_steps_took_above_their_budget_stays_free_in_later_ones() -> None:
    """Without learning, seven steps exceed this budget, each by a little more."""
    peaks, parameters, _ = trained(EVALUATIONS)
    budget = int(0.7 * max(peaks))
    under, same, learned_bytes = trained(EVALUATIONS, budget)
    over = [peak - budget for peak in under if peak > budget]
    assert len(over) <= 3
    assert learned_bytes == sum(over)
    assert under[-1] <= budget
    assert all(map(torch.equal, parameters, same))


def test_a_session_whose_steps_keep_to_their_budget_learns_nothing() -> None:
    peaks, _, _ = trained([8] * 5)
    assert trained([8] * 5, int(0.7 * max(peaks)))[2] == 0


def test_no_more_than_a_share_of_the_budget_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_book, "_MOST_UNFORESEEN", 200)
    few = EVALUATIONS[:5]
    budget = int(0.7 * max(trained(EVALUATIONS[-1:])[0]))
    under, _, learned_bytes = trained(few, budget)
    assert max(under) - budget > budget // 200
    assert learned_bytes == budget // 200
