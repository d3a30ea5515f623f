"""Plans a recorded step: the plan, its predicted timeline, and on request a bound on how far from optimal it is.

plan_step() is the one place that holds plans to the budget: it corrects plans of our policies that are over it, takes
the shortest that fits, and refuses plans that do not fit if the caller asks for that.

note_on() names the limits of a plan before a run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, VdnnError
from vdnn.planning.bound.lower_bound import Bound, lower_bound
from vdnn.planning.catalogue import make_planner
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import describe_interval, least_bytes
from vdnn.planning.policies import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import recording_under
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.prefix_cut import PrefixCut
from vdnn.planning.search.use_moments import with_room_at_uses
from vdnn.planning.simulate import SimulatedStep, simulate_followed
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline, Track

_SLOW = 1.25  # times the step with everything kept: from here on a note says why


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A recording with its plan. `followed` is the step with its recomputes: the points of the plan are points of
    that recording. `simulated` is the predicted step. `bound` is None if it was not asked for or its solver is not
    installed. Planning took `plan_seconds`."""

    recording: Recording
    plan: Plan
    followed: Recording
    simulated: SimulatedStep
    bound: Bound | None
    plan_seconds: float

    @property
    def timeline(self) -> Timeline:
        """The predicted timeline."""
        return self.simulated.timeline

    @property
    def fits(self) -> bool:
        budget_bytes = self.plan.budget_bytes
        return budget_bytes is None or self.simulated.peak_bytes <= budget_bytes

    @property
    def slowdown(self) -> float:
        """The predicted step time as a multiple of the time with everything kept: 1.05 is 5 % longer."""
        kept_ns = self.recording.kept_ns
        return self.simulated.step_ns / kept_ns if kept_ns else 1.0

    @property
    def is_bound_by_host(self) -> bool:
        return self.timeline.is_bound_by_host

    @property
    def peak_interval(self) -> int:
        peaks = interval_bytes(self.followed, self.plan.lifetimes)
        return peaks.index(max(peaks))

    @property
    def peak_place(self) -> str:
        return describe_interval(self.followed, self.peak_interval)


def plan_step(
    recording: Recording,
    costs: LinkCosts,
    budget_bytes: int | None,
    policy: str | PlanPolicy = "auto",
    *,
    certify: bool = False,
    must_fit: bool = False,
) -> PlannedStep:
    """Plans a step and simulates the plan.

    Raises BudgetError if the policy aims at the budget and no plan meets it. Plans of a policy that may be corrected
    are corrected where they are over the budget; plans of other policies are not changed. If the plan is over the
    budget in the end, `fits` is False, or with `must_fit` an error is raised: BudgetError for `auto`, and VdnnError for
    policies whose rule does not consider the budget. `certify` also computes the bound, which
    may take longer than planning, and plans with the recomputes that the bound's program chose, if there are any.
    """
    began = time.perf_counter()
    planner = make_planner(policy)
    request = PlanRequest(recording, costs, budget_bytes)
    best = _shortest(planner, request, planner.followed_candidates(request), are_sorted=planner.are_sorted(request))
    if budget_bytes is not None and best.simulated.peak_bytes > budget_bytes:
        if planner.name == "auto":
            cut = _shortest(PrefixCut(), request, PrefixCut().followed_candidates(request))
            if cut.simulated.peak_bytes < best.simulated.peak_bytes:
                best = cut._replace(plan=replace(cut.plan, policy=planner.name))
        if must_fit and best.simulated.peak_bytes > budget_bytes:
            raise _no_fit(planner, recording, best, budget_bytes)
    seconds = time.perf_counter() - began
    bound = None
    if certify:
        bound = _bound(recording, costs, budget_bytes, best.simulated.step_ns)
        if bound is not None and bound.recomputes and isinstance(planner, Auto):
            other = planner.with_recomputes(request, bound.recomputes)
            plans = [best.plan, *([] if other is None else [other])]
            best = _shortest(planner, request, [(one, recording_under(recording, one.lifetimes)) for one in plans])
    return PlannedStep(recording, *best, bound, seconds)


def _no_fit(planner: PlanPolicy, recording: Recording, best: _Candidate, budget_bytes: int) -> VdnnError:
    peak_bytes = best.simulated.peak_bytes
    if planner.name != "auto":
        return VdnnError(
            f"policy {planner.name!r} has no plan under {format_bytes(budget_bytes)}: the one it makes needs "
            f"{format_bytes(peak_bytes)}. The policy 'auto' finds one from {format_bytes(least_bytes(recording))} on."
        )
    # The estimate of the least memory is a lower bound: copies that a use needs at once may take more.
    peaks = interval_bytes(best.followed, best.plan.lifetimes)
    return BudgetError(
        budget_bytes=budget_bytes,
        least_bytes=peak_bytes,
        where=describe_interval(best.followed, peaks.index(max(peaks))),
        resident_bytes=recording.resident_bytes,
    )


class _Candidate(NamedTuple):
    """A plan, the step with its recomputes, and its prediction."""

    plan: Plan
    followed: Recording
    simulated: SimulatedStep


def _shortest(
    planner: PlanPolicy, request: PlanRequest, plans: Iterable[tuple[Plan, Recording]], *, are_sorted: bool = False
) -> _Candidate:
    """The plan with the shortest step, corrected. `plans` has each beside the step with its recomputes. Where not even
    the first one fits, the others may take as much memory as it does."""
    best: _Candidate | None = None
    most_bytes = 0
    for one, followed in plans:
        found = _corrected(planner, request, one, followed)
        simulated = found.simulated
        if best is None:
            best = found
            most_bytes = max(request.budget_bytes or 0, simulated.peak_bytes)
        elif simulated.step_ns < best.simulated.step_ns and simulated.peak_bytes <= most_bytes:
            best = found
        if best.simulated.step_ns <= request.recording.kept_ns:
            break
        if are_sorted and found.plan is one and simulated.peak_bytes <= (request.budget_bytes or 0):
            break  # it was not corrected, so no later one is shorter
    if best is None:
        raise RuntimeError(f"policy {planner.name!r}: expected at least one candidate, got none")
    return best


def _corrected(planner: PlanPolicy, request: PlanRequest, plan: Plan, followed: Recording) -> _Candidate:
    """The plan with its prediction, under the budget where it can be."""
    _, costs, budget_bytes = request
    simulated = simulate_followed(followed, plan, costs)
    if budget_bytes is not None and simulated.peak_bytes > budget_bytes and planner.may_be_corrected:
        # The search does not see all memory that a use needs.
        plan = with_room_at_uses(followed, plan, budget_bytes)
        simulated = simulate_followed(followed, plan, costs)
    return _Candidate(plan, followed, simulated)


def _bound(recording: Recording, costs: LinkCosts, budget_bytes: int | None, step_ns: int) -> Bound | None:
    if budget_bytes is None or step_ns == recording.kept_ns:
        return Bound(recording.kept_ns, is_whole=True)  # no step is shorter than with everything kept
    try:
        return lower_bound(recording, costs, budget_bytes, enough_ns=step_ns)
    except VdnnError:
        return None


def note_on(planned: PlannedStep, costs: LinkCosts) -> str | None:
    """A sentence or two that a user should know about this plan. None if there is nothing to say."""
    recording, budget_bytes = planned.recording, planned.plan.budget_bytes
    most = recording.peak_bytes
    if not recording.lifetimes:
        return "no plan can help, because the step saves nothing that may be offloaded."
    if budget_bytes is None or budget_bytes >= most:
        slower = f"; this plan takes {100 * (planned.slowdown - 1):.1f} % longer" if planned.slowdown > 1 else ""
        return f"keep everything: it fits, in {format_bytes(most)}{slower}.{_no_less(recording)}"
    copied = planned.timeline.copied_bytes
    to_host, to_device = copied(Track.TO_HOST), copied(Track.TO_DEVICE)
    copies_ns = 1e9 * (to_host / costs.to_host_bytes_per_s + to_device / costs.to_device_bytes_per_s)
    if planned.slowdown > _SLOW and copies_ns > recording.compute_ns:
        return (
            f"this plan is slow because of the link: its copies take {copies_ns / 1e6:.0f} ms, and the step computes "
            f"for {recording.compute_ns / 1e6:.0f} ms. A larger budget moves less."
        )
    return None


def _no_less(recording: Recording) -> str:
    """Says where no smaller budget can be met."""
    most = recording.peak_bytes
    if least_bytes(recording) < most:
        return ""
    peaks = [point.peak_bytes for point in recording.points]
    where = describe_interval(recording, peaks.index(most))
    return f" No plan takes less: the peak is at {where}, where nothing that was saved is left to move."
