"""auto: what is kept, moved or rebuilt so that the step stays under the budget with the least slowdown. The default.

What is best to move is looked for without rebuilds, and with the rebuilds that a shorter search found best: so it is
never slower than with moves alone. The same recording gives the same plan anywhere.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.errors import BudgetError
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import candidates_of, planned_rebuild, with_rebuilds
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.search.recompute_choice import RebuildChoice
from vdnn.planning.search.use_moments import with_room_at_uses
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Plan

_FINALISTS = 3
_LONG = 1500  # points of a step of which one finalist has to do


class Auto(PlanPolicy):
    """`effort` scales how long it looks."""

    def __init__(self, effort: float = 1.0) -> None:
        self._effort = effort
        self._moves = AutoOffload(effort)
        self._moves_besides_rebuilds = AutoOffload(effort, asks_others=False)

    @property
    def name(self) -> str:
        return "auto"

    @property
    def source(self) -> str:
        return "vdnn"

    def plan(self, request: PlanRequest) -> Plan:
        recording, budget_bytes = request.recording, request.budget_bytes
        moved = replace(self._moves.plan(request), policy=self.name)
        if budget_bytes is None or not moved.offloaded_bytes or not candidates_of(recording):
            return moved
        if simulate(recording, moved, request.costs).peak_bytes > budget_bytes:
            moved = with_room_at_uses(recording, moved, budget_bytes)  # what it takes is to be compared
        shortest, shortest_ns = moved, simulate(recording, moved, request.costs).step_ns
        if shortest_ns <= recording.compute_ns:
            return moved
        finalists = _FINALISTS if len(recording.points) <= _LONG else 1
        plans = [
            self._with_rebuilds(request, one.chosen) for one in RebuildChoice(request, self._effort).best(finalists)
        ]
        for plan in plans:
            if plan is None:
                continue
            timeline = simulate(recording, plan, request.costs)
            if timeline.peak_bytes > budget_bytes:
                plan = with_room_at_uses(recording, plan, budget_bytes)
                timeline = simulate(recording, plan, request.costs)
            if timeline.step_ns < shortest_ns and timeline.peak_bytes <= budget_bytes:
                shortest, shortest_ns = plan, timeline.step_ns
        return shortest

    def _with_rebuilds(self, request: PlanRequest, chosen: frozenset[int]) -> Plan | None:
        """None if what is rebuilt does not fit with what it is made of."""
        followed = with_rebuilds(request.recording, chosen)
        try:
            plan = self._moves_besides_rebuilds.plan(request._replace(recording=followed))
        except BudgetError:
            return None
        lifetimes = tuple(
            planned_rebuild(request.recording.lifetimes[index]) if index in chosen else one
            for index, one in enumerate(plan.lifetimes)
        )
        return replace(plan, policy=self.name, lifetimes=lifetimes)
