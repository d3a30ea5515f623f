"""Every recomputing policy, on any step: its plan includes the recomputes and is deterministic, and auto's step is
never longer.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import examples
from tests.planning.policies.steps import made_plan
from tests.planning.published.recomputed_chains import least_peak_bytes, recomputed
from tests.planning.recordings import LINKS, any_recomputable_recording
from vdnn.errors import BudgetError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.recomputing import recording_under, with_recomputes
from vdnn.planning.simulate import require_plan_of, simulate
from vdnn.step.recording import Recording

RECOMPUTES_ONLY = ("chen-sqrt", "chen-recursive", "megengine-sublinear", "dtr")
ALL = (*RECOMPUTES_ONLY, "capuchin-full")


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(60), deadline=None)
@given(recording=any_recomputable_recording(6), costs=LINKS, share=st.floats(0, 1))
def test_a_plan_is_of_the_step_with_its_recomputes(
    name: str, recording: Recording, costs: LinkCosts, share: float
) -> None:
    least = least_bytes(recording)
    budget = least + round(share * (recording.peak_bytes - least))
    plan = made_plan(name, recording, budget, costs)
    assert (plan.policy, plan.budget_bytes) == (name, budget)
    followed = recording_under(recording, plan.lifetimes)
    require_plan_of(followed, plan)
    timeline = simulate(recording, plan, costs)
    assert timeline.step_ns >= followed.compute_ns
    assert made_plan(name, recording, budget, costs) == plan, "another plan for the same step"
    if name == "capuchin-full":
        assert max(interval_bytes(followed, plan.lifetimes)) <= budget
    else:
        assert not plan.offloaded_bytes
        assert least_peak_bytes(recording) <= timeline.peak_bytes
        assert name == "dtr" or timeline.peak_bytes <= recording.peak_bytes, "nothing is asked of it that is worse"
        assert timeline.step_ns == with_recomputes(recording, recomputed(plan)).compute_ns


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(30), deadline=None)
@given(recording=any_recomputable_recording(6), costs=LINKS)
def test_what_fits_is_kept_and_what_nothing_can_meet_is_refused(
    name: str, recording: Recording, costs: LinkCosts
) -> None:
    assert not recomputed(made_plan(name, recording, recording.peak_bytes, costs))
    with pytest.raises(BudgetError):
        made_plan(name, recording, least_bytes(recording) - 1, costs)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(40), deadline=None)
@given(recording=any_recomputable_recording(4), costs=LINKS, share=st.floats(0, 1))
def test_auto_is_at_least_as_fast(name: str, recording: Recording, costs: LinkCosts, share: float) -> None:
    least = least_bytes(recording)
    budget = least + round(share * (recording.peak_bytes - least))
    planned = plan_step(recording, costs, budget, name)
    if planned.fits:
        auto = plan_step(recording, costs, budget, "auto")
        assert auto.timeline.step_ns <= planned.timeline.step_ns
