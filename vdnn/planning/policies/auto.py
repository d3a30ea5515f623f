"""auto: what is kept, moved or rebuilt so that the step stays under the budget with the least slowdown. The default.

What is best to move is looked for without rebuilds, and with the rebuilds that a shorter search found best: so it is
never slower than with moves alone. The same recording gives the same plan anywhere.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.errors import BudgetError
from vdnn.planning.policies.auto_offload import AutoOffload
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.rebuild_choice import RebuildChoice
from vdnn.planning.rebuilding import candidates_of, planned_rebuild, with_rebuilds
from vdnn.planning.simulate import simulate
from vdnn.step_plan import Plan

_FINALISTS = 3
_LONG = 1500  # points of a step of which one finalist has to do


class Auto(PlanPolicy):
    """`effort` scales how long it looks."""

    def __init__(self, effort: float = 1.0) -> None:
        self._effort = effort
        self._moves = AutoOffload(effort)

    @property
    def name(self) -> str:
        return "auto"

    @property
    def source(self) -> str:
        return "vdnn"

    def plan(self, request: PlanRequest) -> Plan:
        recording = request.recording
        moved = replace(self._moves.plan(request), policy=self.name)
        if not moved.offloaded_bytes or not candidates_of(recording):
            return moved
        shortest, shortest_ns = moved, simulate(recording, moved, request.costs).step_ns
        if shortest_ns <= recording.compute_ns:
            return moved
        finalists = _FINALISTS if len(recording.points) <= _LONG else 1
        for trial in RebuildChoice(request, self._effort).best(finalists):
            try:
                plan = self._with_rebuilds(request, trial.chosen)
            except BudgetError:
                continue  # what is rebuilt has to be there with what it is made of
            step_ns = simulate(recording, plan, request.costs).step_ns
            if step_ns < shortest_ns:
                shortest, shortest_ns = plan, step_ns
        return shortest

    def _with_rebuilds(self, request: PlanRequest, chosen: frozenset[int]) -> Plan:
        followed = with_rebuilds(request.recording, chosen)
        plan = self._moves.plan(request._replace(recording=followed))
        lifetimes = tuple(
            planned_rebuild(request.recording.lifetimes[index]) if index in chosen else one
            for index, one in enumerate(plan.lifetimes)
        )
        return replace(plan, policy=self.name, lifetimes=lifetimes)
