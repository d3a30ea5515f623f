"""What published rules would rebuild, as starts for a search: theirs, exactly; the slow ones of short steps only."""

from __future__ import annotations

from tests.planning.policies.steps import EVEN, made_plan
from tests.planning.published.recomputed_chains import rebuilt, rebuilt_chain
from vdnn.planning.policies import PlanRequest
from vdnn.planning.published.capuchin_full import to_recompute
from vdnn.planning.published.published_choices import published_choices


def test_they_are_those_of_the_policies() -> None:
    recording = rebuilt_chain([10] * 9, [5] * 8, compute_ns=10)
    budget = recording.peak_bytes - 25
    request = PlanRequest(recording, EVEN, budget)
    policies = ("dtr", "chen-sqrt", "megengine-sublinear")
    theirs = [rebuilt(made_plan(policy, recording, budget)) for policy in policies]
    assert list(published_choices(request)) == [*theirs, set(to_recompute(request, budget))]
    assert all(theirs)


def test_of_long_steps_only_the_quick_ones() -> None:
    recording = rebuilt_chain([10] * 200, [5] * 199)
    assert len(recording.points) == 401
    assert len(list(published_choices(PlanRequest(recording, EVEN, recording.peak_bytes - 25)))) == 2
