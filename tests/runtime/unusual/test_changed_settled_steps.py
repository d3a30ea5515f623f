"""A settled step may change at any point: the gate is left in the middle, and gradients stay those of plain torch."""

from __future__ import annotations

import random

import pytest
import torch

from tests.runtime.rigs.settled_steps import (
    CHANGES,
    LAYERS,
    OF_A_RECIPE,
    OFFLOADS_SOME,
    PLANS,
    PLANS_WITH_RECOMPUTES,
    RECOMPUTES_SOME,
    Change,
    network_for,
    settle,
    settled_session,
    settling_of,
)
from vdnn.runtime.steps import settling

# A step that changes takes more than its budget, and differs from a plan that was given.
pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")


@pytest.fixture(autouse=True)
def never_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_MOST_FAILURES", 1 << 30)
    monkeypatch.setattr(settling, "_MOST_LESSONS", 1 << 30)


def changes_of(plan: str) -> list[str]:
    """The gradient of a gradient takes more than the budget, whatever is offloaded."""
    has_budget = plan in (OFFLOADS_SOME, RECOMPUTES_SOME)
    return [name for name in CHANGES if not has_budget or name != "a gradient of a gradient"]


def same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


def run_changes(plan: str, changes: list[Change]) -> int:
    """Returns how many of the steps left the gate in the middle."""
    plain = network_for(plan)  # outside of the machine, whose memory counts
    unchanged = plain.step()
    expected = [plain.step(change) for change in changes]
    left = 0
    with settled_session(plan) as (session, network):
        for change, gradients in zip(changes, expected, strict=True):
            assert same(network.step(change), gradients), change
            session.step()
            left += not settling_of(session).is_expected
            assert same(network.step(), unchanged), f"the step after {change}"
            session.step()
            settle(session, network)
    return left


ALL_PLANS = (*PLANS, *PLANS_WITH_RECOMPUTES)


@pytest.mark.drawn(of=6)
@pytest.mark.parametrize(("plan", "name"), [(plan, name) for plan in ALL_PLANS for name in changes_of(plan)])
def test_a_step_that_changes_has_the_gradients_of_plain_torch(name: str, plan: str) -> None:
    run_changes(plan, [Change(name, at) for at in (0, LAYERS // 2, LAYERS - 1)])


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize("plan", PLANS_WITH_RECOMPUTES)
@pytest.mark.parametrize("name", OF_A_RECIPE)
def test_a_recipe_that_changes_recomputes_what_plain_torch_has(name: str, plan: str) -> None:
    run_changes(plan, [Change(name, at) for at in range(0, LAYERS, 3)])


@pytest.mark.slow
@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("plan", ALL_PLANS)
def test_random_changes_have_the_gradients_of_plain_torch(plan: str) -> None:
    drawn = random.Random(17)
    changes = [Change(drawn.choice(changes_of(plan)), drawn.randrange(LAYERS)) for _ in range(20)]
    assert run_changes(plan, changes) >= 15


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("plans", [PLANS, PLANS_WITH_RECOMPUTES], ids=["moves", "recomputes"])
def test_a_thousand_random_changes_have_the_gradients_of_plain_torch(seed: int, plans: tuple[str, ...]) -> None:
    drawn = random.Random(seed)
    plan = drawn.choice(plans)
    changes = [Change(drawn.choice(changes_of(plan)), drawn.randrange(LAYERS)) for _ in range(100)]
    assert run_changes(plan, changes) > 75


def test_a_training_in_which_one_step_of_five_differs_stays_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a loss term, or a log of gradients, now and then."""
    monkeypatch.undo()  # the limits are the real ones
    run_changes(PLANS[0], [Change("a transposed save", 4)] * 14)


def test_a_step_that_differed_leaves_no_plan_that_all_later_steps_differ_from() -> None:
    drawn = random.Random(0)
    assert drawn.choice(PLANS) == OFFLOADS_SOME
    names = changes_of(OFFLOADS_SOME)
    run_changes(OFFLOADS_SOME, [Change(drawn.choice(names), drawn.randrange(LAYERS)) for _ in range(6)])
