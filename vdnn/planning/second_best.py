"""Why a storage got its action: what the next best action for it would have cost.

For each of the largest storages the other actions are tried in its place, one at a time, with a short search for the
moves of all the others. The costs are of these short searches throughout, so they compare with each other, and not to
the nanosecond with the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.planned_step import PlannedStep
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recomputing import candidates_of, planned_rebuild, with_rebuilds
from vdnn.planning.search.auto_offload import first_choices
from vdnn.planning.search.local_search import Choice, Search
from vdnn.planning.search.step_model import make_step_model, tuples_of_plan
from vdnn.step.plan import Action
from vdnn.step.recording import Recording, SaveKey

_MOVES = 40  # evaluations of moves for each trial


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """`rebuild` is the operation that makes or would make it again. `second_best` is None where nothing else fits, and
    then so is `more_ns`, what it would add to the step."""

    lifetime: int
    key: SaveKey | None
    nbytes: int
    action: Action
    rebuild: str | None
    second_best: Action | None
    more_ns: int | None


def explain(planned: PlannedStep, costs: LinkCosts, most: int) -> tuple[StorageChoice, ...]:
    """The largest storages of the step, at most so many."""
    lifetimes = planned.recording.lifetimes
    largest = sorted(range(len(lifetimes)), key=lambda index: (-lifetimes[index].nbytes, index))[:most]
    return _Trials(planned, costs).choices(largest) if planned.plan.budget_bytes is not None else ()


class _Trials:
    def __init__(self, planned: PlannedStep, costs: LinkCosts) -> None:
        assert planned.plan.budget_bytes is not None, "without a budget everything is kept"
        self._planned = planned
        self._recording = planned.recording
        self._request = PlanRequest(planned.recording, costs, planned.plan.budget_bytes)
        self._budget_bytes = planned.plan.budget_bytes
        self._candidates = frozenset(candidates_of(planned.recording))
        planned_lifetimes = planned.plan.lifetimes
        self._rebuilt = frozenset(index for index, one in enumerate(planned_lifetimes) if one.is_rebuilt)
        # Gaps by their lifetimes and numbers: a choice of rebuilds may add some and take others.
        gaps = gaps_of(planned.followed)
        moved = {gap for gap, _, _ in tuples_of_plan(gaps, planned.plan)}
        self._moved = {(gap.lifetime, gap.number) for place, gap in enumerate(gaps) if place in moved}

    def choices(self, largest: Sequence[int]) -> tuple[StorageChoice, ...]:
        base_ns = self._step_ns(self._rebuilt, None)
        return tuple(self._choice(index, base_ns) for index in largest)

    def _choice(self, index: int, base_ns: int | None) -> StorageChoice:
        lifetime, action = self._recording.lifetimes[index], self._planned.plan.lifetimes[index].action
        others: dict[Action, int | None] = {}
        if action is not Action.KEEP:
            others[Action.KEEP] = self._step_ns(self._rebuilt - {index}, index)
        if action in (Action.RECOMPUTE, Action.COMPRESS):
            others[Action.OFFLOAD] = self._step_ns(self._rebuilt - {index}, None)
        elif index in self._candidates:
            others[planned_rebuild(lifetime).action] = self._step_ns(self._rebuilt | {index}, None)
        fitting = {other: step_ns for other, step_ns in others.items() if step_ns is not None}
        second = min(fitting, key=lambda other: fitting[other], default=None)
        more_ns = None if second is None or base_ns is None else max(0, fitting[second] - base_ns)
        return StorageChoice(
            index,
            self._recording.points[lifetime.saves[0]].key,
            lifetime.nbytes,
            action,
            None if lifetime.rebuild is None else lifetime.rebuild.operation,
            second,
            more_ns,
        )

    def _step_ns(self, rebuilt: frozenset[int], stays: int | None) -> int | None:
        """With these rebuilds, and what the plan moves or what more it takes; None if that does not fit."""
        followed: Recording = with_rebuilds(self._recording, rebuilt)
        if followed.peak_bytes <= self._budget_bytes:
            return followed.compute_ns
        gaps = [gap for gap in gaps_of(followed) if gap.lifetime != stays]
        if not gaps:
            return None
        model = make_step_model(followed, gaps, self._request.costs)
        computed_ns = [point.compute_ns for point in followed.points]
        as_planned = Choice(bytes((gap.lifetime, gap.number) in self._moved for gap in gaps))
        starts = [as_planned, *first_choices(computed_ns, gaps, self._request.costs)]
        found = Search(model, gaps, self._budget_bytes, followed.compute_ns, _MOVES).run(starts)
        return None if found is None else found.step_ns
