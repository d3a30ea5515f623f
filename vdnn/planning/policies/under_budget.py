"""What policies that aim at a budget have in common: when nothing has to leave, and which plan to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vdnn.planning.footprint import interval_bytes
from vdnn.planning.gaps import planned_lifetimes
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.step.plan import Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Recording

Lifetimes = tuple[PlannedLifetime, ...]


def budget_to_meet(request: PlanRequest) -> int | None:
    """None if nothing has to leave: no budget is given, or everything kept stays under it. BudgetError if no plan
    would."""
    if request.budget_bytes is None or request.recording.peak_bytes <= request.budget_bytes:
        return None
    require_feasible_budget(request.recording, request.budget_bytes)
    return request.budget_bytes


def keep_everything(request: PlanRequest, policy: str) -> Plan:
    lifetimes = planned_lifetimes(request.recording, {})
    return make_plan(request.recording, policy, lifetimes, request.budget_bytes)


def peak_bytes(recording: Recording, lifetimes: Sequence[PlannedLifetime]) -> int:
    return max(interval_bytes(recording, lifetimes))


def first_that_fits(recording: Recording, candidates: Iterable[Lifetimes], budget_bytes: int) -> Lifetimes:
    """Else the one with the lowest peak, of several the first. There is at least one."""
    closest: Lifetimes | None = None
    closest_bytes = 0
    for lifetimes in candidates:
        peak = peak_bytes(recording, lifetimes)
        if peak <= budget_bytes:
            return lifetimes
        if closest is None or peak < closest_bytes:
            closest, closest_bytes = lifetimes, peak
    assert closest is not None, "no candidates"
    return closest
