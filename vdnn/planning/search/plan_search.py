"""Makes the native search for a plan from a request: for the moves of a step with some recomputes, and for recomputes.

The search itself is csrc/planning: local_search, move_search and recompute_search explain it. It is native because it
evaluates thousands of choices; its readable form is in tests/planning/reference, and tests check that both find the
same plans.
"""

from __future__ import annotations

from collections.abc import Collection

from vdnn import _C
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.planning.search.effort import Effort


def make_plan_search(request: PlanRequest, effort: Effort, known: Collection[int] = ()) -> _C.PlanSearch:
    """The search for a request, which has to have a budget. `known`: recomputes in the plan of a similar step. The
    search tries them first, without those for which this step has no recipe."""
    recording, costs, budget_bytes = request
    if budget_bytes is None:
        raise RuntimeError("make_plan_search: expected a request with a budget, got none")
    return _C.PlanSearch(
        step=recorded_step(recording),
        link=make_link_model(costs),
        copy_issue_ns=costs.issue_ns,
        budget_bytes=budget_bytes,
        effort=effort,
        known=[one for one in sorted(known) if recording.lifetimes[one].recompute is not None] if known else [],
    )
