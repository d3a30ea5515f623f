"""With its state on the host, optimizers compute the bits of plain PyTorch, also where test_bits_by_way.py does not
look: other optimizers of torch, all dtypes and layouts, under a plan, and in groups that are stepped as a whole.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import Manage, on_host
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, same, train
from vdnn.bytesize import parse_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.training_state.slices import slices_of


@pytest.mark.parametrize("loop", ["plain", "resumed"])
@pytest.mark.parametrize("name", ["Adadelta", "Adamax", "ASGD", "RAdam", "Rprop"])
def test_the_other_optimizers_of_torch_have_the_bits_of_plain_pytorch(name: str, loop: str, manage: Manage) -> None:
    make = getattr(torch.optim, name)
    assert same(train(make, LOOPS[loop]), train(make, LOOPS[loop], manage))


class Kinds(nn.Module):
    """Parameters of several dtypes and layouts, one without elements and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.bfloat = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.float64 = nn.Linear(4, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.images(x).mean((2, 3)) * self.scale + self.nothing.sum()
        out = self.bfloat(hidden.bfloat16()).double() + self.float64(hidden.double())
        return (out @ self.transposed.double()).square().mean() + (self.phase.abs() * hidden).mean()


def test_states_of_all_dtypes_and_layouts(manage: Manage) -> None:
    def trained(inside: Any) -> list[Any]:
        torch.manual_seed(2)
        model = Kinds()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        losses = []
        with inside(optimizer):
            for _ in range(6):
                optimizer.zero_grad()
                losses.append(model(torch.randn(2, 3, 8, 8)))
                losses[-1].backward()
                optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
        return [*(loss.detach() for loss in losses), *(one.detach() for one in model.parameters()), state]

    assert same(trained(lambda _: contextlib.nullcontext()), trained(manage))


def test_a_session_with_a_plan_for_its_budget_has_the_bits_of_plain_pytorch() -> None:
    """The budget is 85 % of what the steps take with the state on the device."""

    def trained(machine: VirtualMachine, budget: str | None, *, is_managed: bool) -> tuple[list[Any], int]:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[Any] = []
        away: list[int] = []
        limits = vdnn.Limits(offload_window="128KiB", reload_window="128KiB")
        managed = optimizer if is_managed else None
        session = vdnn.offload(budget=budget, device=machine, min_bytes=0, limits=limits, optimizer=managed)
        with session if budget else contextlib.nullcontext():
            for _ in range(8):
                optimizer.zero_grad()
                losses.append(model(torch.randn(512, 128)).square().mean())
                losses[-1].backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                away.append(on_host(optimizer))
            assert not budget or session.plan is not None
            assert (away[0] > 0) == is_managed
            state = copy.deepcopy(optimizer.state_dict())
        found = [*(loss.detach() for loss in losses), *(one.detach() for one in model.parameters()), state]
        session.close()
        return found, machine.peak_bytes

    with VirtualMachine("h100", fake=False) as machine:
        expected, peak_bytes = trained(machine, None, is_managed=False)
    budget = f"{int(0.85 * peak_bytes) >> 10}KiB"
    with VirtualMachine("h100", fake=False) as machine:
        found, peak_bytes = trained(machine, budget, is_managed=True)
    assert same(expected, found)
    assert peak_bytes - parse_bytes(budget) <= 0


class OtherParameter(nn.Parameter):
    """Torch steps a list with a subclass in a loop, and a list without one by foreach."""


@pytest.mark.parametrize("kind", ["alike", "another class", "a sparse gradient"])
def test_a_group_of_which_torch_decides_as_a_whole_is_one_slice(kind: str) -> None:
    group = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    if kind == "another class":
        group[1] = OtherParameter(torch.ones(4, 4))
    elif kind == "a sparse gradient":
        for one in group:
            one.grad = torch.ones(4, 4)
        group[1].grad = torch.ones(4, 4).to_sparse()
    slices = slices_of([{"params": group}], lambda one: one.nbytes, 64)
    assert [len(one.parameters[0]) for one in slices] == ([1, 1, 1] if kind == "alike" else [3])


def test_the_comparison_finds_a_difference() -> None:
    make = OPTIMIZERS["adamw"]
    expected = train(make, LOOPS["plain"])
    assert not same(expected, train(make, LOOPS["clipped_by_value"]))
    other = train(make, LOOPS["plain"])
    other[-3][0]["exp_avg"].view(-1)[0] += 1e-6
    assert not same(expected, other)
