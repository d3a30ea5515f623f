"""Several optimizers in a loop, and graphs that are made before one of them steps and used after it. See issue #14."""

from __future__ import annotations

import pytest
import torch

import vdnn
from tests.runtime.unusual.every_mode import MODES, assert_same_in
from tests.runtime.unusual.loops_by_turns import BY_TURNS
from tests.runtime.unusual.small_networks import BATCH, WIDTH, deep
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session

pytestmark = pytest.mark.slow

PROGRAMS = pytest.mark.parametrize("program", BY_TURNS)
# The first plan's recording does not contain what these programs hold from one step to the next.
HOLDS_OVER = {"with a retained graph", "encoder and decoder with an unused head"}


def trained(program: str, steps: int, **options: object) -> Session:
    with VirtualMachine("titan-x", fake=False) as machine:
        step = BY_TURNS[program]()
        with vdnn.offload(device=machine, min_bytes=0, **options) as session:  # type: ignore[arg-type]
            for index in range(steps):
                step(index)
    return session


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@PROGRAMS
def test_it_trains_as_plain_torch_does(program: str, mode: str) -> None:
    assert_same_in(mode, BY_TURNS[program])


@pytest.mark.drawn(of=3)
@PROGRAMS
def test_one_round_of_the_optimizers_is_one_step(program: str) -> None:
    """The runtime learns this when graphs are used across optimizers, and then discards its earlier count."""
    more = trained(program, 10, policy="vdnn-all", measure=True).num_steps
    fewer = trained(program, 6, policy="vdnn-all", measure=True).num_steps
    assert more - fewer == 4


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("program", sorted(set(BY_TURNS) - HOLDS_OVER))
def test_under_the_least_budget_a_planned_step_takes_what_was_said(program: str) -> None:
    session = trained(program, 8, budget="min")
    assert session._engine.steps is not None
    assert session._engine.steps.first_difference is None
    assert session.plan is not None
    assert session.timeline is not None
    assert session.timeline.peak_bytes <= (session.plan.budget_bytes or 0)


@pytest.mark.parametrize("program", sorted(HOLDS_OVER))
def test_what_outlives_a_step_does_not_keep_it_from_ending(program: str) -> None:
    session = trained(program, 9, budget="min")
    assert session._engine.steps is not None
    assert len(session._engine.steps._plans._tables) == 1
    assert session._engine.steps.first_difference is None


def test_one_optimizer_ends_its_step_whatever_lives_on() -> None:
    """The losses are kept in a list, and their graphs are retained."""
    with VirtualMachine("titan-x", fake=False) as machine:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
            for done in range(5):
                assert session.num_steps == done
                kept.append(model(torch.randn(BATCH, WIDTH)).square().mean())
                kept[-1].backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
        assert session.num_steps == 5


def test_a_graph_that_lives_for_ever_delays_the_end_of_one_step_alone() -> None:
    """The graph belongs to the step that made it. Later optimizers wait only for the graphs of their own steps."""
    with VirtualMachine("titan-x", fake=False) as machine:
        step = BY_TURNS["as in DCGAN"]()
        held = deep()
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
            step(0)
            step(1)
            before = session.num_steps
            output = held(torch.randn(BATCH, WIDTH))
            for index in range(12):
                step(index)
            assert before + 6 <= session.num_steps
            del output
        assert session.num_steps < before + 12
