"""auto: keeps, offloads or recomputes each storage so that the step meets the budget with the least slowdown.

The default policy. It searches for the best moves without recomputes, and again with the recomputes that a shorter
search found best, so its plan is never slower than one with moves alone. The same recording gives the same plan on any
machine.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.errors import BudgetError
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import candidates_of, planned_recompute, with_recomputes
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.search.recompute_choice import RecomputeChoice
from vdnn.planning.search.use_moments import with_room_at_uses
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Plan

_FINALISTS = 3
_LONG = 1500  # steps with more points get one finalist only


class Auto(PlanPolicy):
    """`effort` scales how long the search takes."""

    def __init__(self, effort: float = 1.0) -> None:
        self._effort = effort
        self._moves = AutoOffload(effort)
        self._moves_besides_recomputes = AutoOffload(effort, asks_others=False)

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
            moved = with_room_at_uses(recording, moved, budget_bytes)  # before its step is compared with others
        timeline = simulate(recording, moved, request.costs)
        shortest, shortest_ns = moved, timeline.step_ns
        # Where not even moves alone fit with what a use takes for a moment, recomputes may take as much as they do.
        most_bytes = max(budget_bytes, timeline.peak_bytes)
        if shortest_ns <= recording.compute_ns:
            return moved
        finalists = _FINALISTS if len(recording.points) <= _LONG else 1
        plans = [
            self._with_recomputes(request, one.chosen) for one in RecomputeChoice(request, self._effort).best(finalists)
        ]
        for plan in plans:
            if plan is None:
                continue
            timeline = simulate(recording, plan, request.costs)
            if timeline.peak_bytes > budget_bytes:
                plan = with_room_at_uses(recording, plan, budget_bytes)
                timeline = simulate(recording, plan, request.costs)
            if timeline.step_ns < shortest_ns and timeline.peak_bytes <= most_bytes:
                shortest, shortest_ns = plan, timeline.step_ns
        return shortest

    def _with_recomputes(self, request: PlanRequest, chosen: frozenset[int]) -> Plan | None:
        """The best plan with these recomputes. None if the recomputed storages and their inputs do not fit together."""
        followed = with_recomputes(request.recording, chosen)
        try:
            plan = self._moves_besides_recomputes.plan(request._replace(recording=followed))
        except BudgetError:
            return None
        lifetimes = tuple(
            planned_recompute(request.recording.lifetimes[index]) if index in chosen else one
            for index, one in enumerate(plan.lifetimes)
        )
        return replace(plan, policy=self.name, lifetimes=lifetimes)
