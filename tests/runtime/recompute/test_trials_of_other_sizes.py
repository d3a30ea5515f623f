"""A trial of an elementwise or row-wise recipe holds for other sizes; rechecks find what is wrong at one size only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.recompute.saving import Saving, operation_names
from tests.runtime.rigs.settled_steps import settling_of
from tests.runtime.rigs.virtual_training import recompute_all
from vdnn.errors import RecomputeError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute import table
from vdnn.runtime.recompute.operation import Operation
from vdnn.runtime.recompute.rechecks import Check, Rechecks
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.recompute.trial import Trial
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Plan

WIDTH = 16
LENGTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up(self.norm(x)).chunk(2, -1)
        hidden = nn.functional.gelu(first) * second.softmax(-1)
        return x + self.drop(self.down(torch.cat([hidden, first.tanh()], -1)))  # type: ignore[no-any-return]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes of all trials."""
    found: list[Recipe] = []
    run = Trial.run

    def noted(trial: Trial) -> torch.Tensor:
        if isinstance(trial._recipe, Recipe):
            found.append(trial._recipe)
        return run(trial)

    monkeypatch.setattr(Trial, "run", noted)
    return found


class Trained:
    """Steps of any length that follow one plan, which recomputes whatever can be."""

    def __init__(self, machine: VirtualMachine) -> None:
        torch.manual_seed(0)
        self._machine = machine
        self.model = nn.Sequential(*(Block() for _ in range(3)))
        self.plan = self._plan()

    def _plan(self) -> Plan:
        with vdnn.offload("vdnn-all", device=self._machine, measure=True, min_bytes=0) as recorded:
            for _ in range(3):
                self.step(LENGTH)
        assert recorded.recording is not None
        return recompute_all(recorded.recording, offload_rest=False)

    def session(self, **options: Any) -> Session:
        return vdnn.offload(plan=self.plan, device=self._machine, min_bytes=0, **options)

    def step(self, length: int) -> list[torch.Tensor]:
        torch.manual_seed(length)
        self.model.zero_grad()
        self.model(torch.randn(4, length, WIDTH)).square().mean().backward()
        return [one.grad.clone() for one in self.model.parameters() if one.grad is not None]


@pytest.fixture
def trained() -> Iterator[Trained]:
    with VirtualMachine("titan-x", fake=False) as machine:
        yield Trained(machine)


def by_row(recipes: list[Recipe]) -> list[Recipe]:
    return [one for one in recipes if all(step.operation.is_by_row for step in one.steps)]


def test_a_step_of_a_new_length_under_a_plan_tries_no_recipe_of_elementwise_and_row_wise_operations(
    trained: Trained, tried: list[Recipe]
) -> None:
    """Without this, each of these steps tries as many as the first one."""
    lengths = (LENGTH, 20, 12)
    plain = [trained.step(length) for length in lengths]
    counts: list[tuple[int, int]] = []
    with trained.session() as session:
        for length, expected in zip(lengths, plain, strict=True):
            tried.clear()
            assert all(map(torch.equal, expected, trained.step(length)))
            session.step()
            counts.append((len(by_row(tried)), len(tried)))
    cheap, every = counts[0]
    assert cheap == 12
    assert every > cheap
    assert counts[1:] == [(0, every - cheap)] * 2, "recipes with expensive operations are tried at each length"


@pytest.mark.parametrize("options", [{"recheck": 0}, {"tolerance": 1e-6}])
def test_every_length_is_tried_where_no_recheck_follows_or_results_may_differ(
    trained: Trained, tried: list[Recipe], options: dict[str, float]
) -> None:
    counts = []
    with trained.session(**options) as session:
        for length in (LENGTH, 20):
            tried.clear()
            trained.step(length)
            session.step()
            counts.append(len(by_row(tried)))
    assert counts[0] == counts[1] > 0


def test_new_lengths_are_checked_at_every_save_at_first_and_then_at_two_of_each_signature(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []
    check = Rechecks.check

    def noted(rechecks: Rechecks, *args: Any) -> Check | None:
        made = check(rechecks, *args)
        if made is not None:
            *_, shapeless = args
            checked.append(shapeless is not None)
        return made

    monkeypatch.setattr(Rechecks, "check", noted)
    counts = []
    with trained.session() as session:
        for length in (LENGTH, *range(4, 22)):
            checked.clear()
            trained.step(length)
            session.step()
            counts.append(checked.count(True))
    assert counts == [12] * 16 + [8] * 3, "three blocks, with four recipes that hold for any size"
    assert settling_of(session).is_expected, "what the gate discards is read by what Python discards"


@pytest.fixture
def turn_wrong_at() -> Iterator[Callable[[str, int], None]]:
    """Plants an operation that gives other numbers where the last dimension but one has this size."""
    undo: list[Callable[[], None]] = []

    def turn(node: str, length: int) -> None:
        right = table._TABLE[node]
        assert isinstance(right, Operation)
        run = right.run

        def wrong(call: Any, *tensors: torch.Tensor) -> torch.Tensor:
            made = run(call, *tensors)
            return made.mul(1.0001) if made.shape[-2] == length else made

        object.__setattr__(right, "run", wrong)
        undo.append(lambda: object.__setattr__(right, "run", run))

    yield turn
    for one in undo:
        one()


@pytest.mark.parametrize(
    ("node", "name"), [("TanhBackward0", "tanh"), ("GeluBackward0", "gelu"), ("NativeLayerNormBackward0", "layer_norm")]
)
def test_a_recipe_that_is_wrong_at_one_length_only_is_found_by_the_recheck_of_the_first_step_of_that_length(
    trained: Trained, turn_wrong_at: Callable[[str, int], None], node: str, name: str
) -> None:
    turn_wrong_at(node, 20)
    with trained.session() as session:
        for length in (LENGTH, 12):
            trained.step(length)
            session.step()
        trained.step(20)
        with pytest.raises(RecomputeError, match=name):
            session.step()
        plain = trained.step(12)
        session.step()
    assert all(map(torch.equal, plain, trained.step(12)))


def test_a_recipe_that_a_trial_finds_wrong_at_one_length_is_tried_at_each_other_one(
    trained: Trained, tried: list[Recipe], turn_wrong_at: Callable[[str, int], None]
) -> None:
    turn_wrong_at("TanhBackward0", 20)
    lengths = (20, 12, 16)
    plain = [trained.step(length) for length in lengths]
    counts = []
    with trained.session() as session:
        for length, expected in zip(lengths, plain, strict=True):
            tried.clear()
            assert all(map(torch.equal, expected, trained.step(length)))
            session.step()
            counts.append(sum("tanh" in operation_names(one) for one in by_row(tried)))
    assert counts[0] == counts[1] == counts[2] == 3


Make = Callable[[torch.Tensor], torch.Tensor]


def keys(make: Make, x: torch.Tensor, view: Make = lambda x: x) -> tuple[object, object]:
    """The signature of the recipe that makes this of a save, with sizes and without."""
    with Saving() as saving:
        read = view(x.requires_grad_().exp())
        saved = read.cos(), make(read).sin()
        recipe = saving.recipes[-1]
        del saved
    assert saving.failures == []
    return recipe.signature, recipe.shapeless


BY_ROW: dict[str, Make] = {
    "numbers": lambda x: x * 2.0,
    "rows": lambda x: x.softmax(-1) * 2.0,
    "mean of rows": lambda x: x.mean(-1, keepdim=True),
    "slices": lambda x: x[:, 1 : x.shape[1] - 1].neg(),
    "halves": lambda x: x.chunk(2, 1)[1].neg(),
    "views": lambda x: x.view(-1, x.shape[-1]).relu(),
}


@pytest.mark.parametrize("name", BY_ROW)
def test_signatures_without_sizes_are_equal_at_two_lengths(name: str) -> None:
    one, other = (keys(BY_ROW[name], torch.randn(3, length, 8)) for length in (6, 10))
    assert one[0] != other[0]
    assert one[1] is not None
    assert one[1] == other[1]


@pytest.mark.parametrize(
    ("other", "view"),
    [
        (torch.randn(3, 6, 8, dtype=torch.float64), lambda x: x),
        (torch.randn(3, 6, 8, 2), lambda x: x),
        (torch.randn(3, 1, 8), lambda x: x),
        (torch.randn(6, 3, 8), lambda x: x.transpose(0, 1)),
        (torch.randn(3, 6, 9), lambda x: x[:, :, :8]),
        (torch.randn(3, 1, 8), lambda x: x.expand(3, 6, 8)),
    ],
    ids=["dtype", "dimensions", "one row", "order of strides", "gaps", "repeated"],
)
def test_signatures_without_sizes_differ_where_other_code_may_run(other: torch.Tensor, view: Make) -> None:
    one = keys(torch.neg, torch.randn(3, 6, 8))
    assert one[1] not in (None, keys(torch.neg, other, view)[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.matmul(x),
        nn.BatchNorm2d(8),
        lambda x: nn.functional.avg_pool2d(x, 2),
    ],
    ids=["matrix product", "batch norm", "pooling"],
)
def test_operations_over_more_than_a_row_keep_their_sizes(make: Make) -> None:
    signature, shapeless = keys(make, torch.randn(2, 8, 8, 8))
    assert signature is not None
    assert shapeless is None
