"""Recipes are checked after their proof, too: one that turns wrong is found within a stated number of steps, and
reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.virtual_training import recompute_all
from vdnn.errors import RecomputeError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute import proofs, table
from vdnn.runtime.recompute.operation import Operation
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN, Rechecks
from vdnn.runtime.session.session import Session

Step = Callable[[int], torch.Tensor]


@pytest.fixture(autouse=True)
def _recipes_as_they_were() -> Iterator[None]:
    yield
    proofs.disabled_recipes.clear()


def training() -> tuple[nn.Sequential, Step]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(index: int) -> torch.Tensor:
        torch.manual_seed(index)
        loss = model(torch.randn(32, 16)).relu().exp().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


@pytest.fixture
def wrong_from() -> Iterator[Callable[[str], None]]:
    undo: list[Callable[[], None]] = []

    def turn(node: str) -> None:
        right = table._TABLE[node]
        assert isinstance(right, Operation)
        run = right.run
        object.__setattr__(right, "run", lambda call, *tensors: run(call, *tensors).mul(1.0001))
        undo.append(lambda: object.__setattr__(right, "run", run))

    yield turn
    for one in undo:
        one()


def follow(machine: VirtualMachine, step: Step, **options: Any) -> Session:
    """A session on real tensors that follows a plan to recompute everything with a recipe."""
    with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as recorded:
        for index in range(3):
            step(index)
    assert recorded.recording is not None
    plan = recompute_all(recorded.recording, offload_rest=False)
    return vdnn.offload(plan=plan, device=machine, min_bytes=0, **options)


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize("turns_at", [6, 70, 131])
@pytest.mark.parametrize("node", ["TanhBackward0", "SigmoidBackward0"])
def test_a_recipe_that_turns_wrong_is_found_within_twice_the_interval(
    wrong_from: Callable[[str], None], node: str, turns_at: int
) -> None:
    _, step = training()
    found_at: int | None = None
    with VirtualMachine("titan-x", fake=False) as machine:
        session = follow(machine, step)

        def train() -> None:
            nonlocal found_at
            for index in range(turns_at + 2 * DEFAULT_ONE_IN + 1):
                if index == turns_at:
                    wrong_from(node)
                found_at = index
                step(index)

        with session, pytest.raises(RecomputeError) as raised:
            train()
    assert found_at is not None
    assert turns_at <= found_at <= turns_at + 2 * DEFAULT_ONE_IN
    assert raised.value.step == found_at
    assert raised.value.since <= turns_at
    assert raised.value.recipe in proofs.disabled_recipes


def test_the_error_comes_before_the_optimizer_has_used_the_gradients(wrong_from: Callable[[str], None]) -> None:
    model, step = training()
    with VirtualMachine("titan-x", fake=False) as machine, follow(machine, step, recheck=1):
        for index in range(6):
            step(index)
        wrong_from("TanhBackward0")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(RecomputeError, match=r"tanh.*step 6.*recompute=False"):
            step(6)
        after = list(model.parameters())
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_a_recipe_that_was_found_wrong_is_followed_nowhere_any_more(wrong_from: Callable[[str], None]) -> None:
    _, step = training()
    with VirtualMachine("titan-x", fake=False) as machine:
        with follow(machine, step, recheck=1):
            for index in range(6):
                step(index)
            wrong_from("TanhBackward0")
            with pytest.raises(RecomputeError):
                step(6)
            names = {name for name in proofs.disabled_recipes if "tanh" in name}
            step(7)  # follows the plan without that recipe
        assert names
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as again:
            for index in range(4):
                step(index)
    assert again.recording is not None
    recipes = {one.recompute.operation for one in again.recording.lifetimes if one.recompute is not None}
    assert not recipes & names


def test_every_recipe_is_compared_the_first_two_times_at_each_place(open_session: OpenSession) -> None:
    _, step = training()
    session = open_session("recompute-all", recheck=1000)
    compared = []
    with session:
        for index in range(4):
            step(index)
            compared.append(session._engine.rechecks.compared)
    assert session.counters.recomputes
    assert 0 < compared[0] < compared[1] == compared[2] == compared[3]


def test_nothing_is_compared_where_nobody_wants_it(open_session: OpenSession) -> None:
    _, step = training()
    session = open_session("recompute-all", recheck=0)
    with session:
        for index in range(3):
            step(index)
    assert session.counters.recomputes
    assert session._engine.rechecks.compared == 0


@pytest.mark.parametrize("one_in", [1, 2, 7, 64])
def test_one_step_of_every_so_many_is_checked(one_in: int) -> None:
    rechecks = Rechecks(one_in)
    checked = []
    for _ in range(50 * one_in):
        rechecks.step_ended()
        checked.append(rechecks.is_checking)
    windows = [sum(checked[begin : begin + one_in]) for begin in range(one_in - 1, 48 * one_in, one_in)]
    assert windows == [1] * len(windows)


@pytest.mark.parametrize("recheck", [-1, 1.5, True, "often"])
def test_what_is_no_number_of_steps_is_refused(recheck: object) -> None:
    with pytest.raises(ValueError, match="recheck: expected a number of steps"):
        vdnn.offload("vdnn-all", device="sim", recheck=recheck)  # type: ignore[arg-type]
