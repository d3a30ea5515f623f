"""A step that was planned: the plan, what it will cost, how far from optimal that is, and whether it helps at all."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.planning.bound.lower_bound import Bound, lower_bound
from vdnn.planning.catalogue import make_planner
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import describe_interval, least_bytes
from vdnn.planning.policies import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import recording_under
from vdnn.planning.search.use_moments import with_room_at_uses
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

# Whose plans are mended where they take more than they were made for.
_OURS = ("auto", "auto-offload")
# Copies of all that may move take so many times the step's computing: then most of them cannot be hidden.
_SATURATED = 2


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """`bound` is none where nobody asked for it, or its solver is not installed. Planning took `plan_seconds`."""

    recording: Recording
    plan: Plan
    timeline: Timeline
    bound: Bound | None
    plan_seconds: float

    @property
    def fits(self) -> bool:
        budget_bytes = self.plan.budget_bytes
        return budget_bytes is None or self.timeline.peak_bytes <= budget_bytes

    @property
    def slowdown(self) -> float:
        """1.05: five per cent longer than with everything kept."""
        computed_ns = self.recording.compute_ns
        return self.timeline.step_ns / computed_ns if computed_ns else 1.0

    @property
    def followed(self) -> Recording:
        """The step with the plan's rebuilds: the plan's points are those of it."""
        return recording_under(self.recording, self.plan.lifetimes)

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
) -> PlannedStep:
    """`certify` looks for the bound too, which may take longer than the plan."""
    began = time.perf_counter()
    plan = make_planner(policy).plan(PlanRequest(recording, costs, budget_bytes))
    timeline = simulate(recording, plan, costs)
    if budget_bytes is not None and timeline.peak_bytes > budget_bytes and plan.policy in _OURS:
        # Its search does not see all that a use takes. Other policies' plans are shown as they are.
        plan = with_room_at_uses(recording, plan, budget_bytes)
        timeline = simulate(recording, plan, costs)
    seconds = time.perf_counter() - began
    bound = None
    if certify:
        bound = _bound(recording, costs, budget_bytes, timeline.step_ns)
    return PlannedStep(recording, plan, timeline, bound, seconds)


def _bound(recording: Recording, costs: LinkCosts, budget_bytes: int | None, step_ns: int) -> Bound | None:
    if budget_bytes is None or step_ns == recording.compute_ns:
        return Bound(recording.compute_ns, is_whole=True)  # nothing is shorter than its computing
    try:
        return lower_bound(recording, costs, budget_bytes, enough_ns=step_ns)
    except VdnnError:
        return None


def why_it_will_not_help(recording: Recording, costs: LinkCosts, budget_bytes: int | None = None) -> str | None:
    """Before the run: what no plan can change, as a sentence; None if plans can help."""
    least, most = least_bytes(recording), recording.peak_bytes
    if not recording.lifetimes:
        return "it will not help, because the step saves nothing that may leave the device."
    if least >= most:
        peaks = [point.peak_bytes for point in recording.points]
        where = describe_interval(recording, peaks.index(most))
        return (
            f"it will not help, because the peak of {format_bytes(most)} is at {where}, where nothing that was saved "
            "is left to move."
        )
    if budget_bytes is not None and budget_bytes >= most:
        return f"there is nothing to do: the step needs {format_bytes(most)} with everything kept."
    there_and_back_ns = (most - least) * (1e9 / costs.to_host_bytes_per_s + 1e9 / costs.to_device_bytes_per_s)
    if there_and_back_ns > _SATURATED * recording.compute_ns:
        return (
            "at its least memory it will be slow, because the link is saturated: there and back "
            f"{format_bytes(most - least)} take {there_and_back_ns / 1e6:.0f} ms, and the step computes for "
            f"{recording.compute_ns / 1e6:.0f} ms. A larger budget moves less."
        )
    return None
