"""Steps of several kinds that begin alike: each kind gets a plan, which is followed in steps of that kind.

See issue #14.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.unusual.every_mode import MODES, Factory, assert_same_in
from tests.runtime.unusual.loops_by_turns import kinds_in_turn, wgan_gp
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.kinds import StepKinds, kind_with
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.step.recording import SaveKey

pytestmark = pytest.mark.slow


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def smooth(y: torch.Tensor) -> torch.Tensor:
    return y.tanh().exp().mean()


def entropy(y: torch.Tensor) -> torch.Tensor:
    return -(y.softmax(-1) * y.log_softmax(-1)).sum()


LOOPS: dict[str, tuple[Factory, int, int]] = {  # a factory, the number of our steps in a round, and the number of kinds
    "WGAN-GP, 3": (wgan_gp(3), 4, 2),
    "WGAN-GP, 5": (wgan_gp(5), 6, 2),
    "two by turns": (kinds_in_turn(square, smooth, pattern="AB"), 1, 2),
    "another loss now and then": (kinds_in_turn(square, entropy, pattern="AAAB"), 1, 2),
    "three": (kinds_in_turn(square, smooth, entropy, pattern="ABAC"), 1, 3),
}
PROGRAMS = pytest.mark.parametrize("program", LOOPS)


class Followed:
    """Collects the kind, the plan, the peak and the budget of every finished step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, object | None, int, int]] = []
        finish = StepWatch._finish_observers

        def noted(watch: StepWatch, step: WatchedStep, outliving: Any) -> None:
            executor = step.executor
            finish(watch, step, outliving)
            peak_bytes = 0 if step.meter is None else step.meter.peak_bytes
            budget_bytes = 0 if executor is None else executor.plan.budget_bytes or 0
            self.steps.append((step.keys.kind, executor, peak_bytes, budget_bytes))

        monkeypatch.setattr(StepWatch, "_finish_observers", noted)


def trained(program: str, rounds: int, budget: int | str) -> Session:
    with VirtualMachine("titan-x", fake=False) as machine:
        torch.manual_seed(4)
        step = LOOPS[program][0]()
        with vdnn.offload(budget=budget, device=machine, min_bytes=0) as session:
            for index in range(rounds):
                step(index)
    return session


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plan at 60 %"])
@PROGRAMS
def test_it_trains_as_plain_torch_does(program: str, mode: str) -> None:
    assert_same_in(mode, LOOPS[program][0], 8 if LOOPS[program][1] > 1 else 24)


@pytest.mark.drawn(of=2)
@PROGRAMS
def test_no_step_takes_more_than_the_least_once_the_kinds_are_known(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps_a_round, kinds = LOOPS[program]
    followed = Followed(monkeypatch)
    session = trained(program, 10 if steps_a_round > 1 else 32, "min")
    assert session._engine.steps is not None
    assert len(session._engine.steps._plans._tables) == kinds
    last = followed.steps[-12:]
    assert all(executor is not None for _, executor, _, _ in last)
    assert len({(kind, id(executor)) for kind, executor, _, _ in last}) == kinds
    assert [(peak, budget) for _, _, peak, budget in last if peak > budget] == []


@pytest.mark.drawn(of=3)
@PROGRAMS
def test_no_step_takes_more_than_a_budget_in_bytes_once_the_kinds_are_known(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps_a_round, kinds = LOOPS[program]
    followed = Followed(monkeypatch)
    trained(program, 10 if steps_a_round > 1 else 32, "min")
    budget_bytes = max(budget for _, _, _, budget in followed.steps) + 4096
    followed.steps.clear()
    session = trained(program, 12 if steps_a_round > 1 else 40, budget_bytes)
    assert session._engine.steps is not None
    assert len(session._engine.steps._plans._tables) == kinds
    assert [peak for _, _, peak, _ in followed.steps[-12:] if peak > budget_bytes] == []


# Prediction of the next step from the kinds alone.

FIRST = SaveKey("", "0", "float32", (4,), (1,), 0)


def expected_kinds(kinds: str) -> str:
    """The expected kind of each step. "-" stands for no expectation."""
    watched, found = StepKinds(), []
    for kind in kinds:
        expected = watched.expected(FIRST)
        found.append("-" if expected is None else chr(expected))
        watched.ended(FIRST, ord(kind))
    return "".join(found)


@pytest.mark.parametrize("pattern", ["A", "AB", "AAB", "AAAB", "AAAAAB", "ABAC", "AAAAAAAAAAB"])
def test_a_pattern_is_known_after_it_came_twice(pattern: str) -> None:
    rows = pattern * 5
    assert expected_kinds(rows)[3 * len(pattern) :] == rows[3 * len(pattern) :]


def test_what_is_remembered_is_bounded() -> None:
    watched = StepKinds()
    for kind in range(3000):
        watched.ended(FIRST, kind)
    assert len(watched._rows) <= 512
    assert len(watched._seen) <= 256


def test_kinds_differ_by_the_order_of_their_saves() -> None:
    other = SaveKey("", "1", "float32", (4,), (1,), 0)
    one, two = kind_with(kind_with(0, FIRST), other), kind_with(kind_with(0, other), FIRST)
    assert one != two
