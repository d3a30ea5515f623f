"""A session with a budget plans its second step from the first one, and plans again from the second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.errors import BudgetError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.plan import Plan

BUDGET_BYTES = 1200 << 10


def trained(batches: list[int], budget_bytes: int = BUDGET_BYTES) -> tuple[list[int], list[int], list[Plan | None]]:
    """The times and the peaks of steps with these batches, and the plans that were the latest after each."""
    times_ns, peaks, plans = [], [], []
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0) as session:
            for batch in batches:
                machine.reset_peak()
                begin_ns = machine.now_ns
                model(torch.zeros(batch, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                times_ns.append(machine.now_ns - begin_ns)
                peaks.append(machine.peak_bytes)
                plans.append(session.plan)
    return times_ns, peaks, plans


def test_the_second_step_follows_a_plan_of_the_first_one() -> None:
    times_ns, peaks, plans = trained([320, 320, 320])
    assert plans[0] is not None
    assert max(peaks) <= BUDGET_BYTES, "the state of the optimizer came after the first step"
    assert times_ns[1] <= 1.1 * times_ns[2]
    assert plans[1] is not plans[0], "the second step was recorded, and planned from"


def test_a_larger_second_step_does_not_follow_it() -> None:
    _, peaks, plans = trained([160, 320, 320])
    assert plans[0] is not None
    assert max(peaks) <= BUDGET_BYTES
    assert plans[1] is not None
    assert plans[1].lifetimes[0].nbytes > plans[0].lifetimes[0].nbytes


def test_a_first_step_that_no_plan_fits_ends_nothing() -> None:
    _, peaks, plans = trained([8000, 320, 320])
    assert peaks[0] > BUDGET_BYTES
    assert plans[0] is None
    assert plans[2] is not None
    assert max(peaks[1:]) <= BUDGET_BYTES


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adam one by one": partial(torch.optim.Adam, foreach=False),
    "adam foreach": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "centered": partial(torch.optim.RMSprop, momentum=0.9, centered=True, foreach=True),
    "adadelta": torch.optim.Adadelta,
}
WAYS: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], dict[str, Any]]] = {
    "activations": lambda model, optimizer: {},
    "optimizer": lambda model, optimizer: {"optimizer": optimizer},
    "gradients": lambda model, optimizer: {"optimizer": optimizer, "gradients": True},
    "parameters": lambda model, optimizer: {"model": model, "optimizer": optimizer, "parameters": "all"},
}


def peaks_with(optimizer: str, way: str, budget_bytes: int, steps: int) -> list[int]:
    peaks = []
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 8)
        stepped = OPTIMIZERS[optimizer](model.parameters())
        options = WAYS[way](model, stepped)
        with vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0, **options):
            for _ in range(steps):
                machine.reset_peak()
                model(torch.zeros(256, 64)).square().sum().backward()
                stepped.step()
                stepped.zero_grad()
                peaks.append(machine.peak_bytes)
    return peaks


_AND_MANAGED = [*((one, "activations") for one in OPTIMIZERS), ("adam", "optimizer"), ("adam", "gradients")]


@pytest.mark.parametrize(
    ("optimizer", "way", "larger"),
    # Steps behind the first one fetch parameters ahead, which the first does not show.
    [*((*one, larger) for one in _AND_MANAGED for larger in (1.0, 1.06)), ("adam", "parameters", 1.06)],
)
def test_the_optimizers_state_appears_and_all_steps_keep_within_the_budget(
    optimizer: str, way: str, larger: float
) -> None:
    """The first step ends with the state that later ones begin with. It does not count twice."""
    with pytest.raises(BudgetError) as refused:
        peaks_with(optimizer, way, 64 << 10, 3)
    budget_bytes = int(larger * refused.value.least_bytes)
    assert max(peaks_with(optimizer, way, budget_bytes, 4)) <= budget_bytes


class Vocabulary(torch.nn.Module):
    """Its logits take far more than all that it saves before them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.trunk = perceptron(64, 24)
        self.head = torch.nn.Linear(64, 1024, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.log_softmax(self.head(self.trunk(x)), -1)


def peaks_of_logits(budget_bytes: int, *, bias: bool) -> list[int]:
    peaks = []
    with VirtualMachine("titan-x") as machine:
        model = Vocabulary(bias=bias)
        optimizer = torch.optim.Adam(model.parameters())
        with vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0):
            for _ in range(4):
                machine.reset_peak()
                model(torch.zeros(4096, 64)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(machine.peak_bytes)
    return peaks


@pytest.mark.parametrize("larger", [1.05, 1.2])
@pytest.mark.parametrize("bias", [False, True])
def test_a_first_step_has_room_for_the_logits_of_a_large_vocabulary(larger: float, *, bias: bool) -> None:
    """The product is larger than all that was saved, so what was saved before does not tell of it. It saves its weight
    first without a bias, and its operand first with one."""
    with pytest.raises(BudgetError) as refused:
        peaks_of_logits(64 << 10, bias=bias)
    budget_bytes = int(larger * refused.value.least_bytes)
    assert max(peaks_of_logits(budget_bytes, bias=bias)) <= budget_bytes
