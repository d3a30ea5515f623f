"""auto against all plans: its step is the shortest, it stays under the budget, and a larger budget is never slower."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

from tests.drawn import examples, for_examples, quick_and_full
from tests.planning.recordings import LINKS, any_recording, chain
from tests.planning.reference.exhaustive import count_of_plans, shortest_steps
from vdnn.errors import BudgetError
from vdnn.planning.bound.lower_bound import lower_bound
from vdnn.planning.catalogue import make_planner
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.policies import PlanRequest
from vdnn.planning.simulate import simulate
from vdnn.step.recording import Recording

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # one nanosecond for each byte
_MOST_PLANS = 4_000


def step_ns(recording: Recording, costs: LinkCosts, budget_bytes: int) -> int:
    """The step of the plan as the search found it. plan_step() may make it longer where a use needs memory that neither
    the search nor the reference counts."""
    plan = make_planner("auto").plan(PlanRequest(recording, costs, budget_bytes))
    assert max(interval_bytes(recording, plan.lifetimes)) <= budget_bytes
    return simulate(recording, plan, costs).step_ns


def test_what_fits_stays() -> None:
    recording = chain([10, 20, 30])
    plan = make_planner("auto").plan(PlanRequest(recording, EVEN, recording.peak_bytes))
    assert plan.offloaded_bytes == 0
    assert make_planner("auto").plan(PlanRequest(recording, EVEN, None)).offloaded_bytes == 0


def test_too_small_a_budget_is_refused_with_the_smallest_that_is_not() -> None:
    recording = chain([10, 20, 30])
    with pytest.raises(BudgetError) as refused:
        make_planner("auto").plan(PlanRequest(recording, EVEN, 1))
    assert refused.value.least_bytes == least_bytes(recording)
    assert step_ns(recording, EVEN, refused.value.least_bytes) > 0


def test_copies_that_computing_hides_cost_nothing() -> None:
    recording = chain([10, 20, 30, 20, 10], compute_ns=100)
    assert step_ns(recording, EVEN, least_bytes(recording)) > recording.compute_ns, "at the least there is no room"
    assert step_ns(recording, EVEN, recording.peak_bytes - 10) == recording.compute_ns


def test_the_same_recording_gives_the_same_plan() -> None:
    recording = chain([50, 20, 40, 10, 30, 25], compute_ns=30)
    request = PlanRequest(recording, EVEN, least_bytes(recording) + 20)
    assert make_planner("auto").plan(request) == make_planner("auto").plan(request)


@pytest.mark.slow
@quick_and_full("examples", 80, 1000)
def test_its_step_is_the_shortest_there_is(examples: int) -> None:
    for_examples(examples, assert_its_step_is_the_shortest, recording=any_recording(4), costs=LINKS)


def assert_its_step_is_the_shortest(recording: Recording, costs: LinkCosts) -> None:
    """The budgets are the least one, half way, and just below the peak with everything kept. The bound is not above any
    plan's step."""
    assume(1 < count_of_plans(recording) <= _MOST_PLANS)
    least, most = least_bytes(recording), recording.peak_bytes
    budgets = sorted({least, (least + most) // 2, max(least, most - 1)})
    before: int | None = None
    for budget, best in zip(budgets, shortest_steps(recording, costs, budgets), strict=True):
        assert best is not None, "the least budget is one that a plan meets"
        found = step_ns(recording, costs, budget)
        assert best <= found <= best * 1.01, (budget, best, found)
        assert before is None or found <= before, "more budget is never slower"
        before = found
        bound = lower_bound(recording, costs, budget)
        assert bound.step_ns <= best


@settings(max_examples=examples(60), deadline=None)
@given(recording=any_recording(6), costs=LINKS)
def test_no_plan_is_under_less_than_the_least(recording: Recording, costs: LinkCosts) -> None:
    assume(count_of_plans(recording) <= _MOST_PLANS)
    least = least_bytes(recording)
    assert shortest_steps(recording, costs, [least - 1, least])[0] is None
    assert step_ns(recording, costs, least) >= recording.compute_ns
