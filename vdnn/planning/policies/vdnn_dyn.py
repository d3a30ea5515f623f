"""vdnn-dyn: the least offloading and the fastest convolutions that fit, found by a few passes (Rhu et al., MICRO 2016).

The passes, in the paper's order: nothing is offloaded, with the fastest algorithms; vdnn-conv with them; vdnn-all with
them; vdnn-conv, each convolution with the fastest algorithm whose workspace fits; vdnn-all likewise; vdnn-all with the
least workspaces. The plan is that of the first pass under the budget, or else of the pass with the lowest peak.
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
    """The lifetimes and algorithms of one pass. `peak_bytes` includes the workspaces of the algorithms."""

    name: str
    lifetimes: Lifetimes
    algorithms: Choice
    peak_bytes: int


class VdnnDyn(PlanPolicy):
    """Without a budget nothing is offloaded. `algorithms`: the algorithms of each convolution of the step that is
    planned, if their workspaces are known.

    Differences from the paper: its profiling passes are simulated on the recording. It first runs vdnn-all with the
    least workspaces to see whether the network can be trained at all; here BudgetError says so, exactly. Without known
    workspaces, (m) and (p) are the same and three passes are left: nothing, vdnn-conv, vdnn-all.
    """

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
        """The pass whose plan is taken, with its algorithms, which a plan does not contain."""
        if request.budget_bytes is not None:
            leanest = with_algorithms(request.recording, memory_optimal(self._algorithms))
            require_feasible_budget(leanest, request.budget_bytes)
        too_large: list[Pass] = []
        for tried in self._passes(request):
            if request.budget_bytes is None or tried.peak_bytes <= request.budget_bytes:
                return tried
            too_large.append(tried)
        return min(too_large, key=lambda one: one.peak_bytes)

    def _passes(self, request: PlanRequest) -> Iterator[Pass]:
        recording = request.recording
        fastest = performance_optimal(self._algorithms)
        yield _tried("none (p)", recording, planned_lifetimes(recording, {}), fastest)
        schedules = {
            "conv": layerwise(request, partial(is_used_by_convolution, recording), has_barrier=self._has_barrier),
            "all": layerwise(request, lambda _: True, has_barrier=self._has_barrier),
        }
        for name, lifetimes in schedules.items():
            yield _tried(f"{name} (p)", recording, lifetimes, fastest)
        if not self._algorithms:
            return
        for name, lifetimes in schedules.items():
            peaks = interval_bytes(recording, lifetimes)
            choice = fastest_that_fit(self._algorithms, peaks, request.budget_bytes or 0)
            yield _tried(f"{name} (greedy)", recording, lifetimes, choice)
        yield _tried("all (m)", recording, schedules["all"], memory_optimal(self._algorithms))


def _tried(name: str, recording: Recording, lifetimes: Lifetimes, choice: Choice) -> Pass:
    return Pass(name, lifetimes, choice, peak_bytes(with_algorithms(recording, choice), lifetimes))
