"""Trials of recipes take memory of the step: they count, and run where the budget has room for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.networks import images, perceptron, small_resnet
from vdnn.runtime.machine.gauges import VirtualGauges
from vdnn.runtime.recompute.trial import Trial
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.steps import StepWatch


def encoder() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 128, batch_first=True) for _ in range(3)))


def normed() -> nn.Module:
    layers = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*(one for layer in layers for one in layer))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutions": (small_resnet, lambda: images(16)),
    "encoder": (encoder, lambda: torch.randn(8, 24, 32)),
    "norms and dropout": (normed, lambda: torch.randn(256, 64)),
    "perceptron": (lambda: perceptron(64, 10), lambda: torch.randn(256, 64)),
}


@dataclass(frozen=True)
class Trained:
    session: Session
    highest_bytes: int  # allocated at any time of the first step, trials included
    peak_bytes: int  # of the machine
    trials: int

    @property
    def tells_recomputes(self) -> int:
        recording = self.session.recording
        assert recording is not None
        return sum(one.recompute is not None for one in recording.lifetimes)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int | None], Trained]:
    """Trains a network for one step, with real numbers, under this budget."""
    live: list[int] = []
    trials: list[Trial] = []
    grown, run = VirtualGauges._grown, Trial.run

    def noted_growth(gauges: VirtualGauges, live_bytes: int) -> None:
        live.append(live_bytes)
        grown(gauges, live_bytes)

    def noted_trial(trial: Trial) -> torch.Tensor:
        trials.append(trial)
        return run(trial)

    monkeypatch.setattr(VirtualGauges, "_grown", noted_growth)
    monkeypatch.setattr(Trial, "run", noted_trial)

    def train(network: str, budget_bytes: int | None) -> Trained:
        make, batch = NETWORKS[network]
        with vdnn.VirtualMachine("titan-x", fake=False) as machine:
            model, x = make(), batch()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            policy: dict[str, Any] = (
                {"policy": "keep", "measure": True} if budget_bytes is None else {"budget": budget_bytes}
            )
            with vdnn.offload(device=machine, min_bytes=0, **policy) as session:
                live.clear()
                trials.clear()
                machine.reset_peak()
                for _ in range(2 if budget_bytes is None else 1):  # the first one of a session without a plan is free
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                peak_bytes = machine.peak_bytes
        return Trained(session, max(live), peak_bytes, len(trials))

    return train


@pytest.mark.parametrize("share", [0.75, 0.9])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_first_step_with_trials_keeps_within_its_budget(
    network: str, share: float, trained: Callable[[str, int | None], Trained]
) -> None:
    kept = trained(network, None)
    recording = kept.session.recording
    assert recording is not None
    budget_bytes = int(share * recording.peak_bytes)
    under = trained(network, budget_bytes)
    assert under.trials > 0
    assert under.highest_bytes <= budget_bytes
    assert under.peak_bytes == under.highest_bytes, "trials count"
    steps = under.session._engine.steps
    assert isinstance(steps, StepWatch)
    assert steps.budget.over.total() == 0
    assert under.tells_recomputes >= 0.8 * kept.tells_recomputes, "recipes that wait are tried at their uses"


def test_a_trial_without_room_is_left_out_and_the_next_step_has_the_same_gradients() -> None:
    def gradients(budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with vdnn.VirtualMachine("titan-x", fake=False) as machine:
            model, x = encoder().eval(), torch.randn(8, 24, 32)
            policy: dict[str, Any] = {"policy": "keep"} if budget is None else {"budget": budget}
            with vdnn.offload(device=machine, min_bytes=0, **policy) as session:
                for _ in range(4):
                    model.zero_grad()
                    model(x).square().mean().backward()
                    session.step()
            return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    plain = gradients(None)
    assert all(map(torch.equal, gradients(1400 << 10), plain))


@pytest.mark.parametrize("budget_kib", [1860, 1920])
def test_a_trial_at_a_new_size_under_a_plan_waits_until_there_is_room_for_it(budget_kib: int) -> None:
    """A matrix product is tried at each size. What leaves the device anyway leaves before that trial."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))
    optimizer, budget = torch.optim.AdamW(model.parameters()), budget_kib << 10
    with vdnn.VirtualMachine("h100", fake=False) as machine:
        with vdnn.offload(budget=budget, device=machine, min_bytes=0) as session:
            for rows in (512, 512, 256, 768, 512, 1024, 875, 256, 1024, 768):
                machine.reset_peak()
                model(torch.randn(rows, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert machine.peak_bytes <= budget
        assert session.counters.recomputes > 0
