"""vdnn-dyn: the least offloading and the fastest convolutions that fit, found by a few passes (Rhu et al., MICRO 2016).

The passes, in the paper's order: nothing leaves, with the fastest algorithms; vdnn-conv with them; vdnn-all with them;
vdnn-conv, each convolution with the fastest algorithm whose workspace fits; vdnn-all likewise; vdnn-all with the
algorithms that need the least. The first that stays under the budget is taken, else the one that comes closest.

The paper runs vdnn-all with the least workspaces before all others, only to see whether the network can be trained at
all; here BudgetError says that, and exactly. Where no workspaces are known, (m) and (p) are the same and three passes
are left: nothing, vdnn-conv, vdnn-all. Its profiling passes are simulated here, on the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from vdnn.planning.footprint import interval_bytes
from vdnn.planning.gaps import planned_lifetimes
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.policies.backward_operations import is_used_by_convolution
from vdnn.planning.policies.convolution_algorithms import (
    Algorithms,
    Choice,
    fastest_that_fit,
    memory_optimal,
    performance_optimal,
    with_algorithms,
)
from vdnn.planning.policies.layerwise import layerwise
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import Lifetimes, peak_bytes
from vdnn.step.plan import Plan, make_plan
from vdnn.step.recording import Recording


class Pass(NamedTuple):
    """What one pass tries. `peak_bytes` is with the workspaces of the algorithms."""

    name: str
    lifetimes: Lifetimes
    algorithms: Choice
    peak_bytes: int


class VdnnDyn(PlanPolicy):
    """`algorithms` where workspaces are known, for the step that is planned. Of no budget: nothing leaves."""

    def __init__(self, *, has_barrier: bool = True, algorithms: Algorithms | None = None) -> None:
        self._has_barrier = has_barrier
        self._algorithms: Algorithms = algorithms or {}

    @property
    def name(self) -> str:
        return "vdnn-dyn"

    @property
    def source(self) -> str:
        return "vDNN_dyn (Rhu et al., MICRO 2016)"

    def plan(self, request: PlanRequest) -> Plan:
        return make_plan(request.recording, self.name, self.decide(request).lifetimes, request.budget_bytes)

    def decide(self, request: PlanRequest) -> Pass:
        """The pass whose plan is taken, with the algorithms, of which a plan says nothing."""
        if request.budget_bytes is not None:
            leanest = with_algorithms(request.recording, memory_optimal(self._algorithms))
            require_feasible_budget(leanest, request.budget_bytes)
        closest: Pass | None = None
        for tried in self._passes(request):
            if request.budget_bytes is None or tried.peak_bytes <= request.budget_bytes:
                return tried
            if closest is None or tried.peak_bytes < closest.peak_bytes:
                closest = tried
        assert closest is not None, "there are passes"
        return closest

    def _passes(self, request: PlanRequest) -> Iterator[Pass]:
        recording = request.recording
        fastest = performance_optimal(self._algorithms)
        yield _tried("none (p)", recording, planned_lifetimes(recording, {}), fastest)
        ways = {
            "conv": layerwise(request, partial(is_used_by_convolution, recording), has_barrier=self._has_barrier),
            "all": layerwise(request, lambda _: True, has_barrier=self._has_barrier),
        }
        for name, lifetimes in ways.items():
            yield _tried(f"{name} (p)", recording, lifetimes, fastest)
        if not self._algorithms:
            return
        for name, lifetimes in ways.items():
            peaks = interval_bytes(recording, lifetimes)
            choice = fastest_that_fit(self._algorithms, peaks, request.budget_bytes or 0)
            yield _tried(f"{name} (greedy)", recording, lifetimes, choice)
        yield _tried("all (m)", recording, ways["all"], memory_optimal(self._algorithms))


def _tried(name: str, recording: Recording, lifetimes: Lifetimes, choice: Choice) -> Pass:
    return Pass(name, lifetimes, choice, peak_bytes(with_algorithms(recording, choice), lifetimes))
