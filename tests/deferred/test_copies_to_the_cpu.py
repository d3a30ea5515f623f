"""Copies that a program takes of what has left the device: `.cpu()`, `.to("cpu")` and others have to be copies.

No tensor of the CPU shows that, because plain PyTorch does not copy it either.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode

WIDTH = 48
Optimizer = torch.optim.Optimizer
Program = Callable[[nn.Module, Optimizer], list[torch.Tensor]]


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH).to("deferred")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def around(snapshot: Callable[[nn.Module, Optimizer], list[torch.Tensor]]) -> Program:
    """Takes the snapshot between two steps."""

    def program(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
        train(model, optimizer, range(2))
        taken = snapshot(model, optimizer)
        train(model, optimizer, range(2, 4))
        return taken

    return program


def restored(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Goes back to the best weights and their state."""
    train(model, optimizer, range(2))
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    saved["state"] = {
        key: {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    train(model, optimizer, range(2, 4))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(4, 6))
    return [one.detach() for one in model.parameters()]


def went_on(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Loads dicts that share memory with the training, which changes nothing, and looks at them later."""
    train(model, optimizer, range(2))
    weights, saved = model.state_dict(), optimizer.state_dict()
    train(model, optimizer, range(2, 3))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    return list(weights.values())


def of_state(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def as_tensors(arrays: Iterable[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(one) for one in arrays]


PROGRAMS: dict[str, Program] = {
    "state_dict, cpu()": around(lambda model, _: [one.cpu() for one in model.state_dict().values()]),
    "state_dict, to('cpu')": around(lambda model, _: [one.to("cpu") for one in model.state_dict().values()]),
    "detach, to(device=)": around(
        lambda model, _: [one.detach().to(device=torch.device("cpu")) for one in model.parameters()]
    ),
    "data, cpu(), numpy()": around(lambda model, _: as_tensors(one.data.cpu().numpy() for one in model.parameters())),
    "numpy(force=True)": around(lambda model, _: as_tensors(one.numpy(force=True) for one in model.parameters())),
    "type()": around(lambda model, _: [one.detach().type("torch.FloatTensor") for one in model.parameters()]),
    "a view, cpu()": around(lambda model, _: [one.detach().view(-1)[3:].cpu() for one in model.parameters()]),
    "state, cpu()": around(lambda _, optimizer: [one.cpu() for one in of_state(optimizer)]),
    "state, to(a tensor)": around(lambda _, optimizer: [one.to(torch.ones(1)) for one in of_state(optimizer)]),
    "state_dict, deepcopy": around(lambda model, _: list(copy.deepcopy(model.state_dict()).values())),
    "restored": restored,
    "went on": went_on,
}
WAYS: dict[str, dict[str, Any]] = {
    "state": {},
    "gradients": {"gradients": True},
    "parameters": {"parameters": "all"},
    "deferred step": {"optimizer_step": "deferred"},
}


def found(program: Program, mode: Mode, way: dict[str, Any] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with DeferredAccelerator(mode, capacity="64MiB") as accelerator, contextlib.ExitStack() as sessions:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to("deferred")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if way is not None:
            options = {"device": accelerator, "model": model, "optimizer": optimizer, "min_bytes": 0, **way}
            sessions.enter_context(vdnn.offload("vdnn-all", **options))
        return [one.cpu().clone() for one in program(model, optimizer)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_copies_to_the_cpu_does_not_change(name: str, way: str) -> None:
    expected = found(PROGRAMS[name], Mode.RANDOM, None)
    got = found(PROGRAMS[name], Mode.RANDOM, WAYS[way])
    assert all(map(torch.equal, got, expected))
    assert len(got) == len(expected)
