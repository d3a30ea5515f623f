"""Shared by policies that aim at a budget: whether anything has to be offloaded, and which of several plans to take."""

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
    """The budget, or None if everything can be kept: without a budget, or if the recorded peak is under it. Raises
    BudgetError if no plan is under the budget."""
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
    """The first candidate under the budget. If none is, the one with the lowest peak, of equal ones the first. There
    has to be at least one candidate."""
    tried: list[tuple[int, Lifetimes]] = []
    for lifetimes in candidates:
        peak = peak_bytes(recording, lifetimes)
        if peak <= budget_bytes:
            return lifetimes
        tried.append((peak, lifetimes))
    return min(tried, key=lambda one: one[0])[1]
