"""auto-offload: offloads storages so that the step stays under the budget with the least slowdown. vdnn's own policy.

The search for moves (csrc/planning/move_search.h) counts its effort in evaluations, so the same recording gives the
same plan on any machine.
"""

from __future__ import annotations

from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.search.effort import Effort
from vdnn.planning.search.plan_search import make_plan_search
from vdnn.planning.search.step_model import plan_of
from vdnn.step.plan import Plan


class AutoOffload(PlanPolicy):
    """Keeps or offloads, never recomputes. `effort` scales how long the search takes."""

    def __init__(self, effort: float = 1.0) -> None:
        self._effort = Effort(moves=effort)

    @property
    def name(self) -> str:
        return "auto-offload"

    @property
    def source(self) -> str:
        return "vdnn"

    @property
    def may_be_corrected(self) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        recording, _, budget_bytes = request
        if budget_bytes is None or recording.peak_bytes <= budget_bytes:
            return plan_of(recording, (), (), self.name, budget_bytes)
        require_feasible_budget(recording, budget_bytes)
        absences = make_plan_search(request, self._effort).moves([])
        if absences is None:
            raise RuntimeError("AutoOffload.plan: expected moves under a budget that can be met, got none")
        return plan_of(recording, gaps_of(recording), absences, self.name, budget_bytes)
