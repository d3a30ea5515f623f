"""Steps with some storages rebuilt and none moved: what policies that only recompute choose among.

Each choice is looked at once: its peak and its computing are those of the step with its rebuilds, exactly. Published
rules set neither; here every one of them is given the best of the choices that it comes by.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recomputing import candidates_of, with_rebuilds
from vdnn.step.plan import Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Lifetime, Recording


@dataclass(frozen=True, slots=True)
class RebuiltStep:
    """`chosen`: what is rebuilt."""

    chosen: frozenset[int]
    peak_bytes: int
    compute_ns: int


@dataclass(slots=True)
class RebuiltSteps:
    """Of one recording. `candidates`: what can be rebuilt from others, in the order in which it was saved."""

    recording: Recording
    candidates: tuple[int, ...] = field(init=False)
    _seen: dict[frozenset[int], RebuiltStep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lifetimes = self.recording.lifetimes
        rebuilt = [one for one in candidates_of(self.recording) if not _is_coded(lifetimes[one])]
        self.candidates = tuple(sorted(rebuilt, key=lambda one: (lifetimes[one].saves[0], one)))

    def step(self, chosen: Collection[int]) -> RebuiltStep:
        key = frozenset(chosen)
        if key not in self._seen:
            followed = with_rebuilds(self.recording, key)
            self._seen[key] = RebuiltStep(key, followed.peak_bytes, followed.compute_ns)
        return self._seen[key]

    def best(self, budget_bytes: int | None) -> RebuiltStep:
        """Of all that were looked at the shortest that fits; where none fits, or without a budget, the one with the
        lowest peak."""
        found = self._seen.values()
        fitting = [one for one in found if budget_bytes is not None and one.peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda one: (one.compute_ns, one.peak_bytes, sorted(one.chosen)))
        return min(found, key=lambda one: (one.peak_bytes, one.compute_ns, sorted(one.chosen)))


def _is_coded(lifetime: Lifetime) -> bool:
    """What leaves a part of itself behind is not recomputed."""
    return lifetime.rebuild is not None and lifetime.rebuild.kept_bytes > 0


def plan_of_rebuilds(request: PlanRequest, policy: str, chosen: Collection[int]) -> Plan:
    """These are rebuilt, all else is kept."""
    followed = with_rebuilds(request.recording, chosen)
    lifetimes = tuple(
        PlannedLifetime(one.nbytes, Action.RECOMPUTE if index in chosen else Action.KEEP)
        for index, one in enumerate(followed.lifetimes)
    )
    return make_plan(followed, policy, lifetimes, request.budget_bytes)
