"""Every plan policy, on any step: its plan is valid, can be simulated, is deterministic, and has the predicted peak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import examples
from tests.planning.policies.steps import made_plan, wild_recording
from tests.planning.recordings import LINKS, chain
from vdnn.errors import BudgetError
from vdnn.planning.catalogue import planner_names
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals, interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.simulate import require_plan_of, simulate
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Track

# Policies that may offload any storage: they stay under every budget that can be met.
ALWAYS_UNDER_BUDGET = (
    "auto",
    "prefix-cut",
    "capuchin",
    "capuchin-full",
    "auto-offload",
    "autoswap-doa",
    "autoswap-aoa",
    "autoswap-wdoa",
    "autoswap-swdoa",
    "swapadvisor",
)
# Policies that may exceed the budget.
AIM_AT_NO_BUDGET = ("keep", "vdnn-all", "vdnn-conv")

planners = pytest.mark.parametrize("name", planner_names())


def budget_of(recording: Recording, share: float) -> int:
    least = least_bytes(recording)
    return least + round(share * (recording.peak_bytes - least))


def peak_bytes(recording: Recording, plan: Plan) -> int:
    return max(interval_bytes(recording, plan.lifetimes))


@planners
@settings(max_examples=examples(40), deadline=None)
@given(recording=wild_recording(), costs=LINKS, share=st.floats(0, 1))
def test_a_plan_is_for_its_step_and_can_be_simulated(
    name: str, recording: Recording, costs: LinkCosts, share: float
) -> None:
    budget = budget_of(recording, share)
    plan = made_plan(name, recording, budget, costs)
    require_plan_of(recording, plan)
    assert (plan.policy, plan.budget_bytes) == (name, budget)
    for lifetime, planned in zip(recording.lifetimes, plan.lifetimes, strict=True):
        assert all(absent_intervals(lifetime, absence) for absence in planned.absences), "away for no time at all"
        assert all(absence.release_point >= lifetime.copy_point for absence in planned.absences)
    timeline = simulate(recording, plan, costs)
    assert timeline.step_ns >= recording.compute_ns
    assert timeline.copied_bytes(Track.TO_HOST) == plan.offloaded_bytes
    assert made_plan(name, recording, budget, costs) == plan, "another plan for the same step"
    if name in ALWAYS_UNDER_BUDGET:
        assert peak_bytes(recording, plan) <= budget


@planners
@settings(max_examples=examples(40), deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), costs=LINKS, share=st.floats(0, 1))
def test_its_peak_is_the_footprint_of_its_absences(name: str, sizes: list[int], costs: LinkCosts, share: float) -> None:
    recording = chain(sizes, compute_ns=20)
    plan = made_plan(name, recording, budget_of(recording, share), costs)
    assert simulate(recording, plan, costs).peak_bytes == peak_bytes(recording, plan)


@pytest.mark.parametrize("name", [name for name in planner_names() if name not in AIM_AT_NO_BUDGET])
@settings(max_examples=examples(20), deadline=None)
@given(recording=wild_recording(), costs=LINKS)
def test_what_nothing_can_meet_is_refused_and_what_fits_stays(
    name: str, recording: Recording, costs: LinkCosts
) -> None:
    assert made_plan(name, recording, None, costs).offloaded_bytes == 0
    assert made_plan(name, recording, recording.peak_bytes, costs).offloaded_bytes == 0
    with pytest.raises(BudgetError) as refused:
        made_plan(name, recording, least_bytes(recording) - 1, costs)
    assert refused.value.least_bytes == least_bytes(recording)


@pytest.mark.parametrize("name", AIM_AT_NO_BUDGET)
@given(recording=wild_recording(), costs=LINKS)
def test_what_aims_at_no_budget_plans_the_same_for_each(name: str, recording: Recording, costs: LinkCosts) -> None:
    plans = [made_plan(name, recording, budget, costs) for budget in (None, 1, recording.peak_bytes)]
    assert len({plan.lifetimes for plan in plans}) == 1
