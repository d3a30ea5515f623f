"""vdnn-dyn: the least offloading and the fastest convolutions that fit, found by a few passes (Rhu et al., MICRO 2016).

The passes, in the paper's order: nothing is offloaded, with the fastest algorithms; vdnn-conv with them; vdnn-all with
them; vdnn-conv, each convolution with the fastest algorithm whose workspace fits; vdnn-all likewise; vdnn-all with the
least workspaces. The plan is that of the first pass under the budget, or else of the pass with the lowest peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vdnn.planning.footprint import interval_bytes
from vdnn.planning.gaps import planned_lifetimes
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.policies.backward_operations import is_used_by_convolution
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


# Chooses an algorithm for each convolution of a step: fast algorithms need a workspace, and a workspace is memory.
#
# A recording does not contain workspaces. The caller gives, for each point, the algorithms that the convolution in the
# interval before it may use: the bytes they need beyond the recorded ones, and their time as a multiple of the recorded
# time.


class ConvolutionAlgorithm(NamedTuple):
    name: str
    workspace_bytes: int
    time_factor: float


Algorithms = Mapping[int, Sequence[ConvolutionAlgorithm]]  # by point
Choice = dict[int, ConvolutionAlgorithm]


def memory_optimal(algorithms: Algorithms) -> Choice:
    """The algorithms with the least workspace, the vDNN paper's (m)."""
    return {
        point: min(known, key=lambda one: (one.workspace_bytes, one.time_factor)) for point, known in algorithms.items()
    }


def performance_optimal(algorithms: Algorithms) -> Choice:
    """The fastest algorithms, the vDNN paper's (p)."""
    return {point: _fastest_first(known)[0] for point, known in algorithms.items()}


def fastest_that_fit(algorithms: Algorithms, peaks: Sequence[int], budget_bytes: int) -> Choice:
    """The fastest algorithm of each convolution that fits, or the one with the least workspace if none fits. `peaks`
    are those of every interval without workspaces."""
    choice = memory_optimal(algorithms)
    for point, known in algorithms.items():
        for algorithm in _fastest_first(known):
            if peaks[point] + algorithm.workspace_bytes <= budget_bytes:
                choice[point] = algorithm
                break
    return choice


def with_algorithms(recording: Recording, choice: Choice) -> Recording:
    """The step with the time and the workspaces of these algorithms."""
    points = list(recording.points)
    for index, algorithm in choice.items():
        point = points[index]
        points[index] = dataclasses.replace(
            point,
            compute_ns=round(point.compute_ns * algorithm.time_factor),
            peak_bytes=point.peak_bytes + algorithm.workspace_bytes,
        )
    return dataclasses.replace(recording, points=tuple(points))


def _fastest_first(known: Sequence[ConvolutionAlgorithm]) -> list[ConvolutionAlgorithm]:
    return sorted(known, key=lambda one: (one.time_factor, one.workspace_bytes))
