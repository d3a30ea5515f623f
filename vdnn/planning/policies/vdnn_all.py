"""vdnn-all: offloads every eligible storage (vDNN_all of Rhu et al., MICRO 2016)."""

from __future__ import annotations

from vdnn.planning.policies.layerwise import layerwise
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Plan, make_plan


class VdnnAll(OnlinePolicy):
    """The online form: the least device memory, and the most traffic."""

    @property
    def name(self) -> str:
        return "vdnn-all"

    @property
    def offloads_everything(self) -> bool:
        return True

    @property
    def is_repeatable(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return True


class VdnnAllPlan(PlanPolicy):
    """The form with a recording: offloads layer by layer, see layerwise.py. It ignores the budget.

    Difference from the paper: the authors do not offload the classifier and the last layer's input, whose copies
    nothing hides. Here everything that was recorded is offloaded, as without a recording: in a transformer nearly all
    layers are linear.
    """

    def __init__(self, *, has_barrier: bool = True) -> None:
        self._has_barrier = has_barrier

    @property
    def name(self) -> str:
        return "vdnn-all"

    @property
    def source(self) -> str:
        return "vDNN_all (Rhu et al., MICRO 2016)"

    def plan(self, request: PlanRequest) -> Plan:
        lifetimes = layerwise(request, lambda _: True, has_barrier=self._has_barrier)
        return make_plan(request.recording, self.name, lifetimes, request.budget_bytes)
