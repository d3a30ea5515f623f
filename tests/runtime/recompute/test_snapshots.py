"""Recipes of a policy without a plan read copies of weights, and never copies of what the weights were in an earlier
step whose graph is alive still."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn

WIDTH = 8
STEPS = 8


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x).tanh() + self.up(self.down(x))
        return found


class StepsThroughData(torch.optim.Optimizer):
    """Writes through `.data`, as optimizers did before torch.no_grad: no version changes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(one.grad.detach(), alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "through_data": StepsThroughData,
}


def trained(optimizer: str, session: Any, *, between: Callable[[nn.Module], None], **backward: bool) -> list[Any]:
    """Losses and gradients. Each loss holds its graph until the next one is computed. `between`: in each step, between
    its two backwards."""
    torch.manual_seed(0)
    model, found = Adapted(), list[Any]()
    updates = OPTIMIZERS[optimizer](one for one in model.parameters() if one.requires_grad)
    with session:
        for step in range(STEPS):
            torch.manual_seed(step)
            updates.zero_grad()
            for _ in range(2):
                loss = functional.cross_entropy(model(torch.randn(4, WIDTH)), torch.randint(0, WIDTH, (4,)))
                loss.backward(**backward)
                between(model)
                found.append(loss.item())
                found += [one.grad.detach().clone() for one in model.parameters() if one.grad is not None]
            updates.step()
    return found


def nothing(model: nn.Module) -> None: ...


@torch.no_grad()
def perturbed_through_data(model: nn.Module) -> None:
    for one in model.parameters():
        one.data.mul_(0.9)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("between", [nothing, perturbed_through_data])
@pytest.mark.parametrize("how", ["create_graph", "retain_graph"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_copy_of_an_earlier_step_is_read(
    optimizer: str, how: str, between: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained(optimizer, contextlib.nullcontext(), between=between, **{how: True})
    session = vdnn.offload("recompute-all", device="sim", min_bytes=0, recheck=0)
    ours = trained(optimizer, session, between=between, **{how: True})
    session.close()
    for one, other in zip(plain, ours, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert session.counters.recomputes >= STEPS
    assert "is not recomputed" not in caplog.text, "each recipe gives the bytes that it has to"
