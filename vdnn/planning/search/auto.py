"""auto: keeps, offloads or recomputes each storage so that the step meets the budget with the least slowdown.

The default policy. It searches for the best moves without recomputes, and again with the recomputes that a shorter
search found best. plan_step() takes the shortest of these plans, which is never slower than one with moves alone. The
same recording gives the same plan on any machine.

The search first plans for a host that takes no time. If the host makes the shortest of these plans longer, it searches
once more with the host lane, where each copy and recompute has to be issued, so that fewer and larger ones are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vdnn.errors import BudgetError
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import candidates_of, planned_recompute, with_recomputes
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.search.effort import FULL, Effort
from vdnn.planning.search.recompute_choice import RecomputeChoice
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Plan

_LONG = 1500  # steps with more points get one finalist only


class Auto(PlanPolicy):
    def __init__(self, effort: Effort = FULL) -> None:
        self._effort = effort
        self._moves = AutoOffload(effort.moves)

    @property
    def name(self) -> str:
        return "auto"

    @property
    def source(self) -> str:
        return "vdnn"

    @property
    def may_be_corrected(self) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        """The plan that only moves: the first of the candidates."""
        return replace(self._moves.plan(request), policy=self.name)

    def candidates(self, request: PlanRequest) -> Iterator[Plan]:
        recording, costs = request.recording, request.costs
        if not recording.has_host:
            yield from self._candidates(request)
            return
        without = request._replace(recording=recording.without_host(), costs=costs.without_host())
        steps_ns, alone_ns = [], []
        for one in self._candidates(without):
            yield one
            timeline = simulate(recording, one, costs)
            steps_ns.append(timeline.step_ns)
            if timeline.host_stall_ns:
                timeline = simulate(without.recording, one, without.costs)
            alone_ns.append(timeline.step_ns)
        if min(steps_ns) > min(alone_ns):
            yield from self._candidates(request)

    def _candidates(self, request: PlanRequest) -> Iterator[Plan]:
        moved = self.plan(request)
        yield moved
        if request.budget_bytes is None or not moved.offloaded_bytes or not candidates_of(request.recording):
            return
        finalists = self._effort.finalists if len(request.recording.points) <= _LONG else 1
        for one in RecomputeChoice(request, self._effort).best(finalists):
            plan = self.with_recomputes(request, one.chosen)
            if plan is not None:
                yield plan

    def with_recomputes(self, request: PlanRequest, chosen: frozenset[int]) -> Plan | None:
        """The best plan with these recomputes. None if the recomputed storages and their inputs do not fit together."""
        followed = with_recomputes(request.recording, chosen)
        try:
            plan = self._moves.plan(request._replace(recording=followed))
        except BudgetError:
            return None
        lifetimes = tuple(
            planned_recompute(request.recording.lifetimes[index]) if index in chosen else one
            for index, one in enumerate(plan.lifetimes)
        )
        return replace(plan, policy=self.name, lifetimes=lifetimes)
