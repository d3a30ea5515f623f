"""vdnn-conv: what convolutions save leaves the device (vDNN_conv of Rhu et al., MICRO 2016).

A convolution computes long enough on its input to hide the copy; cheap layers do not. Seen by module: a convolution
called as a function outside an nn.Module is not recognised, and its saves stay. A recording knows which operation used
what, so there every convolution is seen.
"""

from __future__ import annotations

from functools import partial

from vdnn.planning.policies.backward_operations import is_used_by_convolution
from vdnn.planning.policies.layerwise import layerwise
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.step.plan import Plan, make_plan


class VdnnConv(OnlinePolicy):
    """Only saves made while a convolution module runs."""

    @property
    def name(self) -> str:
        return "vdnn-conv"

    def offloads(self, save: SaveFacts) -> bool:
        return save.is_conv


class VdnnConvPlan(PlanPolicy):
    """The same with a recording at hand: layer by layer, as layerwise.py says. It aims at no budget.

    What a convolution and another operation both use leaves too: PyTorch has one storage where the paper has the input
    of one layer and, in place, the output of another.
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
        leaves = partial(is_used_by_convolution, recording)
        lifetimes = layerwise(request, leaves, has_barrier=self._has_barrier)
        return make_plan(recording, self.name, lifetimes, request.budget_bytes)
