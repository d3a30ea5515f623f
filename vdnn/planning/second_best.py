"""Explains why a storage got its action: by how much the next best action would make the step longer.

explain() tries every other action for each of the largest storages, one at a time, with a short search for the moves of
all other storages. All costs are from these short searches, so they can be compared with each other, but differ a
little from the cost of the plan itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.planned_step import PlannedStep
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recomputing import candidates_of, planned_recompute, with_recomputes
from vdnn.planning.search.step_model import make_step_model, plan_of, tuples_of_plan
from vdnn.planning.search.use_moments import with_room_at_uses
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Action
from vdnn.step.recording import Recording, SaveKey

_MOVES = 40  # evaluations of moves for each trial


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """The action for a lifetime and its second best. `recompute`: the operation that recomputes or could recompute it.
    `more_ns`: the time that the second best action would add to the step. Both are None if no other action fits the
    budget.
    `unfitting`: the actions that were tried and would not fit."""

    lifetime: int
    key: SaveKey | None
    nbytes: int
    action: Action
    recompute: str | None
    second_best: Action | None
    more_ns: int | None
    unfitting: tuple[Action, ...] = ()


def explain(planned: PlannedStep, costs: LinkCosts, most: int) -> tuple[StorageChoice, ...]:
    """The choices for the largest storages of the step, at most `most`. None without a budget: all is kept then."""
    budget_bytes = planned.plan.budget_bytes
    if budget_bytes is None:
        return ()
    lifetimes = planned.recording.lifetimes
    largest = sorted(range(len(lifetimes)), key=lambda index: (-lifetimes[index].nbytes, index))[:most]
    return _Trials(planned, costs, budget_bytes).choices(largest)


class _Trials:
    def __init__(self, planned: PlannedStep, costs: LinkCosts, budget_bytes: int) -> None:
        self._planned = planned
        self._recording = planned.recording
        self._request = PlanRequest(planned.recording, costs, budget_bytes)
        self._budget_bytes = budget_bytes
        self._candidates = frozenset(candidates_of(planned.recording))
        planned_lifetimes = planned.plan.lifetimes
        self._recomputed = frozenset(index for index, one in enumerate(planned_lifetimes) if one.is_recomputed)
        # Lifetime and number identify a gap: other choices of recomputes have other gaps.
        gaps = gaps_of(planned.followed)
        moved = {gap for gap, _, _ in tuples_of_plan(gaps, planned.plan)}
        self._moved = {(gap.lifetime, gap.number) for index, gap in enumerate(gaps) if index in moved}

    def choices(self, largest: Sequence[int]) -> tuple[StorageChoice, ...]:
        base_ns = self._step_ns(self._recomputed, None)
        return tuple(self._choice(index, base_ns) for index in largest)

    def _choice(self, index: int, base_ns: int | None) -> StorageChoice:
        lifetime, action = self._recording.lifetimes[index], self._planned.plan.lifetimes[index].action
        others: dict[Action, int | None] = {}
        if action is not Action.KEEP:
            others[Action.KEEP] = self._step_ns(self._recomputed - {index}, index)
        if action in (Action.RECOMPUTE, Action.COMPRESS):
            others[Action.OFFLOAD] = self._step_ns(self._recomputed - {index}, None)
        elif index in self._candidates:
            others[planned_recompute(lifetime).action] = self._step_ns(self._recomputed | {index}, None)
        fitting = {other: step_ns for other, step_ns in others.items() if step_ns is not None}
        second = min(fitting, key=lambda other: fitting[other], default=None)
        more_ns = None if second is None or base_ns is None else max(0, fitting[second] - base_ns)
        return StorageChoice(
            index,
            self._recording.points[lifetime.saves[0]].key,
            lifetime.nbytes,
            action,
            None if lifetime.recompute is None else lifetime.recompute.operation,
            second,
            more_ns,
            tuple(other for other, step_ns in others.items() if step_ns is None),
        )

    def _step_ns(self, recomputed: frozenset[int], kept: int | None) -> int | None:
        """The step with these recomputes and with `kept` on the device. The search begins at the plan's moves. None if
        nothing fits the budget."""
        followed: Recording = with_recomputes(self._recording, recomputed)
        if followed.peak_bytes <= self._budget_bytes:
            return followed.kept_ns
        gaps = [gap for gap in gaps_of(followed) if gap.lifetime != kept]
        if not gaps:
            return None
        model = make_step_model(followed, gaps, self._request.costs)
        as_planned = bytes((gap.lifetime, gap.number) in self._moved for gap in gaps)
        found = _C.local_search(
            model=model,
            budget_bytes=self._budget_bytes,
            kept_ns=followed.kept_ns,
            effort=_MOVES,
            starts=[(as_planned, False, False), *_C.first_choices(model)],
        )
        return None if found is None else self._simulated_ns(followed, gaps, found)

    def _simulated_ns(self, followed: Recording, gaps: Sequence[Gap], found: _C.StepOutcome) -> int | None:
        """The step of a found choice as a plan would run it. None if it does not fit: the search does not see all
        memory that a use needs."""
        plan = plan_of(followed, gaps, found.absences, self._planned.plan.policy, self._budget_bytes)
        timeline = simulate(followed, with_room_at_uses(followed, plan, self._budget_bytes), self._request.costs)
        return timeline.step_ns if timeline.peak_bytes <= self._budget_bytes else None
