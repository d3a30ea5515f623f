"""vdnn-all: every eligible storage leaves the device (vDNN_all of Rhu et al., MICRO 2016)."""

from __future__ import annotations

from vdnn.planning.policies.layerwise import layerwise
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Plan, make_plan


class VdnnAll(OnlinePolicy):
    """The least device memory, and the most traffic."""

    @property
    def name(self) -> str:
        return "vdnn-all"

    @property
    def offloads_everything(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return True


class VdnnAllPlan(PlanPolicy):
    """The same with a recording at hand: layer by layer, as layerwise.py says. It aims at no budget.

    The authors leave the classifier alone, and the last layer's input, for which there is nothing to hide behind. Here
    all that was recorded may leave, as it does without a recording: in a transformer nearly all layers are linear.
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
