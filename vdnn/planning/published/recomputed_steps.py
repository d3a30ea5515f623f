"""Steps with some storages recomputed and none offloaded: the choices of policies that only recompute.

The peak and the compute time of a choice are exactly those of the step with its recomputes. Published rules do not say
which of their choices to take; here every rule gets the best of the choices that it tries.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.step.plan import Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Recompute, Recording


@dataclass(frozen=True, slots=True)
class ChosenRecomputes:
    """The step in which the storages `chosen` are recomputed."""

    chosen: frozenset[int]
    peak_bytes: int
    compute_ns: int


@dataclass(slots=True)
class RecomputedSteps:
    """The choices that were tried for one recording. `candidates`: the storages that can be recomputed from others, in
    the order of their saves; `recomputes` has their recipes. Storages that a codec encodes are not candidates."""

    recording: Recording
    candidates: tuple[int, ...] = field(init=False)
    recomputes: dict[int, Recompute] = field(init=False)
    _seen: dict[frozenset[int], ChosenRecomputes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lifetimes = self.recording.lifetimes
        in_order = sorted(candidates_of(self.recording), key=lambda one: (lifetimes[one].saves[0], one))
        found = ((one, lifetimes[one].recompute) for one in in_order)
        self.recomputes = {
            one: recompute for one, recompute in found if recompute is not None and recompute.kept_bytes == 0
        }
        self.candidates = tuple(self.recomputes)

    def step(self, chosen: Collection[int]) -> ChosenRecomputes:
        key = frozenset(chosen)
        if key not in self._seen:
            followed = with_recomputes(self.recording, key)
            self._seen[key] = ChosenRecomputes(key, followed.peak_bytes, followed.compute_ns)
        return self._seen[key]

    def best(self, budget_bytes: int | None) -> ChosenRecomputes:
        """The shortest step that fits, of those tried. If none fits, or without a budget, that with the lowest peak."""
        found = self._seen.values()
        fitting = [one for one in found if budget_bytes is not None and one.peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda one: (one.compute_ns, one.peak_bytes, sorted(one.chosen)))
        return min(found, key=lambda one: (one.peak_bytes, one.compute_ns, sorted(one.chosen)))


def plan_of_recomputes(request: PlanRequest, policy: str, chosen: Collection[int]) -> Plan:
    """The plan that recomputes the storages `chosen` and keeps all others."""
    followed = with_recomputes(request.recording, chosen)
    lifetimes = tuple(
        PlannedLifetime(one.nbytes, Action.RECOMPUTE if index in chosen else Action.KEEP)
        for index, one in enumerate(followed.lifetimes)
    )
    return make_plan(followed, policy, lifetimes, request.budget_bytes)
