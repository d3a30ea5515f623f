"""Steps that wait for the next forward pass have the bits of plain PyTorch, with what left the device poisoned.

Compared are all losses, norms, parameters, tensors of the state and options of groups, after 20 steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.training_state.conftest import Manage, open_session
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, same, train
from tests.runtime.training_state.parameters.frozen_loops import LOOPS as PROGRAMS
from tests.runtime.training_state.parameters.frozen_loops import MODELS, made
from tests.runtime.training_state.parameters.frozen_loops import train as run_program
from vdnn import _C
from vdnn.runtime.training_state.optimizer_state import state_of

LOOKED_AT = ("adamw-fused",)  # in every loop; the others in those that read what waits


def cells() -> list[Any]:
    found = []
    for optimizer in OPTIMIZERS:
        for loop in LOOPS:
            is_often = (optimizer in LOOKED_AT and loop != "accumulation") or loop == "averaged"
            found.append(pytest.param(optimizer, loop, marks=() if is_often else pytest.mark.full))
    return found


with_gradients = pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])


@with_gradients
@pytest.mark.parametrize(("optimizer", "loop"), cells())
def test_a_training_has_the_bits_of_plain_pytorch(
    optimizer: str, loop: str, gradients: bool, manage: Manage, poisoned: list[int]
) -> None:
    make, train_in = OPTIMIZERS[optimizer], LOOPS[loop]
    deferred, left_bytes = [], []

    @contextlib.contextmanager
    def inside(managed: Any) -> Iterator[None]:
        with manage(managed, optimizer_step="deferred", gradients=gradients):
            yield
        state = state_of(managed)
        deferred.append(state.moved.deferred)
        left_bytes.append(state.gradients.copies.to_host_bytes)
        assert state.gradients.host_bytes == 0

    assert same(train(make, train_in), train(make, train_in, inside))
    waits = optimizer != "third-party" and loop != "by_closures"  # these step at once
    assert (deferred[0] >= 100) if waits and optimizer != "muon" else (deferred[0] > 0) == waits
    assert (left_bytes[0] > 0) == gradients


@with_gradients
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused", "adafactor", "muon"])
def test_tied_weights_have_the_bits_of_plain_pytorch(optimizer: str, gradients: bool, manage: Manage) -> None:
    make, inside = OPTIMIZERS[optimizer], partial(manage, optimizer_step="deferred", gradients=gradients)
    assert same(train(make, LOOPS["plain"], tied=True), train(make, LOOPS["plain"], inside, tied=True))


@with_gradients
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused"])
def test_no_order_of_copies_changes_a_bit(optimizer: str, gradients: bool) -> None:
    make = OPTIMIZERS[optimizer]
    expected = train(make, LOOPS["accumulation"], tied=True)
    for seed in range(8):
        checker = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.RANDOM, seed=seed))

        @contextlib.contextmanager
        def inside(managed: Any, checker: _C.Device = checker) -> Iterator[None]:
            options = {"optimizer_step": "deferred", "gradients": gradients}
            with contextlib.closing(open_session(checker, managed, **options)) as session, session:
                yield

        assert same(expected, train(make, LOOPS["accumulation"], inside, tied=True)), f"seed {seed}"
        checker.close()
        assert checker.take_violations() == []


def programs() -> list[Any]:
    found = []
    for model, program, frozen, gradients in itertools.product(MODELS, PROGRAMS, (False, True), (False, True)):
        is_often = model == "low-rank" if frozen else program == "saved" or (model, program) == ("tied", "evaluated")
        marks = () if is_often and gradients == frozen else pytest.mark.full
        found.append(pytest.param(model, program, frozen, gradients, marks=marks))
    return found


@pytest.mark.parametrize(("model", "program", "frozen", "gradients"), programs())
def test_a_program_has_the_bits_of_plain_pytorch(
    model: str, program: str, frozen: bool, gradients: bool, manage: Manage
) -> None:
    """LoRA, weights that are used twice, outside of their module, in checkpoints and in recurrent layers; evaluation,
    saving, copies and loads in between."""

    def run(*, is_managed: bool) -> list[Any]:
        module = made(model)
        if not frozen:
            module.requires_grad_()
        options: dict[str, Any] = {"model": module, "parameters": "frozen"} if frozen else {}

        def inside(managed: Any) -> contextlib.AbstractContextManager[Any]:
            if not is_managed:
                return contextlib.nullcontext()
            return manage(managed, optimizer_step="deferred", gradients=gradients, **options)

        return run_program(module, program, inside, steps=10, takes_optimizer=True)

    expected, found = run(is_managed=False), run(is_managed=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


class Autocast(nn.Module):
    """Calls an optimizer's step inside and outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outcome: torch.Tensor = self.second(self.first(x).relu())
        return outcome


@pytest.mark.parametrize("steps_inside", [False, True])
def test_the_step_runs_under_the_autocast_of_its_call(steps_inside: bool, manage: Manage) -> None:
    """Muon multiplies matrices, which autocast casts."""

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = Autocast()
        optimizer = torch.optim.Muon([model.first.weight, model.second.weight], lr=0.1)
        with inside(optimizer):
            for _ in range(5):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.randn(4, 8)).float().square().mean()
                    loss.backward()
                    if steps_inside:
                        optimizer.step()
                if not steps_inside:
                    optimizer.step()
                optimizer.zero_grad()
            return [one.detach().clone() for one in model.parameters()]

    plain = run(lambda _: contextlib.nullcontext())
    assert all(map(torch.equal, plain, run(partial(manage, optimizer_step="deferred"))))
