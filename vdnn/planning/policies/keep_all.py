"""keep: keeps everything on the device. Other policies are compared with it."""

from __future__ import annotations

from vdnn.planning.gaps import planned_lifetimes
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Plan, make_plan


class KeepAll(OnlinePolicy):
    """Offloads nothing."""

    @property
    def name(self) -> str:
        return "keep"

    @property
    def may_offload(self) -> bool:
        return False

    def offloads(self, save: SaveFacts) -> bool:
        return False


class KeepAllPlan(PlanPolicy):
    """Offloads nothing, whatever the budget."""

    @property
    def name(self) -> str:
        return "keep"

    @property
    def source(self) -> str:
        return "PyTorch as it is"

    def plan(self, request: PlanRequest) -> Plan:
        return make_plan(request.recording, self.name, planned_lifetimes(request.recording, {}), request.budget_bytes)
