"""vdnn-conv: offloads what convolutions save (vDNN_conv of Rhu et al., MICRO 2016).

A convolution computes long enough on its input to hide the copy; cheap layers do not. The online form recognizes
convolutions by their module, so a convolution that is called as a function outside an nn.Module keeps its saves. A
recording says which operation used each storage, so the form with a recording recognizes every convolution.
"""

from __future__ import annotations

from functools import partial

from vdnn.planning.policies.backward_operations import is_used_by_convolution
from vdnn.planning.policies.layerwise import layerwise
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Plan, make_plan


class VdnnConv(OnlinePolicy):
    """The online form: offloads saves that are made while a convolution module runs."""

    @property
    def name(self) -> str:
        return "vdnn-conv"

    @property
    def is_repeatable(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return save.is_conv


class VdnnConvPlan(PlanPolicy):
    """The form with a recording: offloads layer by layer, see layerwise.py. It ignores the budget.

    A storage that a convolution and another operation both use is offloaded too: PyTorch has one storage where the
    paper has the input of one layer and, in place, the output of another.
    """

    def __init__(self, *, has_barrier: bool = True) -> None:
        self._has_barrier = has_barrier

    @property
    def name(self) -> str:
        return "vdnn-conv"

    @property
    def source(self) -> str:
        return "vDNN_conv (Rhu et al., MICRO 2016)"

    def plan(self, request: PlanRequest) -> Plan:
        recording = request.recording
        may_leave = partial(is_used_by_convolution, recording)
        lifetimes = layerwise(request, may_leave, has_barrier=self._has_barrier)
        return make_plan(recording, self.name, lifetimes, request.budget_bytes)
