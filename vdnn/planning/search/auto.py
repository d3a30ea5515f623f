"""auto: keeps, offloads or recomputes each storage so that the step meets the budget with the least slowdown.

The default policy. It searches for the best moves without recomputes, and again with the recomputes that a shorter
search found best. plan_step() takes the shortest of these plans, which is never slower than one with moves alone. The
same recording gives the same plan on any machine.

The search first plans for a host that takes no time. If the host makes the shortest of these plans longer, it searches
once more with the host lane, where each copy and recompute has to be issued, so that fewer and larger ones are chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from vdnn.planning.gaps import gaps_of, planned_lifetimes
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import keep_everything
from vdnn.planning.recomputing import planned_recompute, recording_under, with_recomputes
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.search.effort import FULL, NEARBY, QUICK, Effort
from vdnn.planning.search.plan_search import make_plan_search
from vdnn.planning.search.step_model import AbsenceTuple, absences_by_gap
from vdnn.planning.simulate import simulate_followed
from vdnn.step.plan import Plan, make_plan
from vdnn.step.recording import Recording

_LONG = 1500  # steps with more points get one finalist only


class Auto(PlanPolicy):
    """`known`: the recomputes of the plan of nearly the same step, from which the search begins."""

    def __init__(self, effort: Effort = FULL, known: Collection[int] = ()) -> None:
        self._effort = effort
        self._known = known
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

    def near(self, plan: Plan) -> Auto:
        """See PlanPolicy. A full search is as long as ever."""
        known = [index for index, one in enumerate(plan.lifetimes) if one.is_recomputed]
        return Auto(NEARBY if self._effort == QUICK else self._effort, known)

    def plan(self, request: PlanRequest) -> Plan:
        """The plan that only moves: one of the candidates."""
        return replace(self._moves.plan(request), policy=self.name)

    def are_sorted(self, request: PlanRequest) -> bool:
        return not request.recording.has_host

    def candidates(self, request: PlanRequest) -> Iterator[Plan]:
        return (plan for plan, _ in self.followed_candidates(request))

    def followed_candidates(self, request: PlanRequest) -> Iterator[tuple[Plan, Recording]]:
        recording, costs = request.recording, request.costs
        if not recording.has_host:
            yield from self._candidates(request)
            return
        without = request._replace(recording=recording.without_host(), costs=costs.without_host())
        steps_ns, alone_ns = [], []
        for one, followed_without in self._candidates(without):
            followed = recording_under(recording, one.lifetimes)
            yield one, followed
            simulated = simulate_followed(followed, one, costs)
            steps_ns.append(simulated.step_ns)
            if simulated.host_stall_ns:
                simulated = simulate_followed(followed_without, one, without.costs)
            alone_ns.append(simulated.step_ns)
        if min(steps_ns) > min(alone_ns):
            yield from self._candidates(request)

    def _candidates(self, request: PlanRequest) -> Iterator[tuple[Plan, Recording]]:
        recording, _, budget_bytes = request
        if budget_bytes is None or recording.peak_bytes <= budget_bytes:
            yield keep_everything(request, self.name), recording
            return
        finalists = self._effort.finalists if len(recording.points) <= _LONG else 1
        search = make_plan_search(request, self._effort._replace(finalists=finalists), self._known)
        found = search.all()
        if not found:
            require_feasible_budget(recording, budget_bytes)
            raise RuntimeError("Auto.candidates: expected moves under a budget that can be met, got none")
        for _, chosen, absences in found:
            yield _plan_of(request, chosen, absences)

    def with_recomputes(self, request: PlanRequest, chosen: Collection[int]) -> Plan | None:
        """The best plan with these recomputes. None if the recomputed storages and their inputs do not fit together."""
        absences = make_plan_search(request, self._effort).moves(sorted(chosen))
        return None if absences is None else _plan_of(request, chosen, absences)[0]


class FoundPlans(PlanPolicy):
    """The plans of `auto` that another search has found, the shortest step first: the recomputes and the absences of
    each."""

    def __init__(self, found: Sequence[tuple[Collection[int], Sequence[AbsenceTuple]]]) -> None:
        self._found = found

    @property
    def name(self) -> str:
        return "auto, as found"

    @property
    def source(self) -> str:
        return "vdnn"

    @property
    def may_be_corrected(self) -> bool:
        return True

    def are_sorted(self, request: PlanRequest) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        return next(self.candidates(request))

    def candidates(self, request: PlanRequest) -> Iterator[Plan]:
        return (plan for plan, _ in self.followed_candidates(request))

    def followed_candidates(self, request: PlanRequest) -> Iterator[tuple[Plan, Recording]]:
        for chosen, absences in self._found:
            yield _plan_of(request, chosen, absences)


def _plan_of(request: PlanRequest, chosen: Collection[int], absences: Sequence[AbsenceTuple]) -> tuple[Plan, Recording]:
    """The plan of `auto` with these recomputes and absences, and the step with the recomputes."""
    recording, _, budget_bytes = request
    followed = with_recomputes(recording, chosen)
    moves = planned_lifetimes(followed, absences_by_gap(gaps_of(followed), absences))
    recomputed = frozenset(chosen)
    lifetimes = tuple(
        planned_recompute(recording.lifetimes[index]) if index in recomputed else one for index, one in enumerate(moves)
    )
    return make_plan(followed, "auto", lifetimes, budget_bytes), followed
