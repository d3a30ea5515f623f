"""Plans the step that a session has recorded: for the budget that was asked for, on the device that it ran on.

Without a budget it is what the device has, less a reserve for what the count of tensors does not see: fragmentation,
and the workspaces of libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.planning.budget import Budget
from vdnn.planning.costs import LinkCosts, measured_costs, profile_costs
from vdnn.planning.least_memory import least_bytes, require_feasible_budget
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

# Of the device's memory, where no budget is given and the memory is a GPU's.
RESERVE = 0.1
# Of a link of which no copy was measured: PCIe gen 4, as large copies of pinned memory get it.
_ASSUMED_LINK = LinkCosts(24e9, 24e9, 42e9, 10_000)


@dataclass(frozen=True, slots=True)
class BudgetPlanner:
    """`profile` is that of a machine that is not there. `budget` None is all that the device has, less the reserve."""

    policy: PlanPolicy
    budget: Budget | None
    host_bytes: int | None
    profile: HardwareProfile | None

    def plan(self, recording: Recording, timeline: Timeline | None, tightened_bytes: int = 0) -> Plan:
        """`timeline` is that of the recorded step, by whose copies the link is known. The plan is for `tightened_bytes`
        less than the budget. Raises BudgetError, or VdnnError where the policy has no plan that fits."""
        budget_bytes = self.budget_bytes(recording)
        costs = self.costs(timeline)
        require_feasible_budget(recording, budget_bytes)
        target_bytes = self.target_bytes(recording, tightened_bytes)
        planned = plan_step(recording, costs, target_bytes, self.policy)
        if not planned.fits and self.policy.name == "auto":
            # Where forwards and backwards interleave (pipelines), what is released at a use is still there when that
            # use has its copy back: a moment that the model which auto searches with does not see, and that could not
            # be mended afterwards (use_moments.py).
            other = plan_step(recording, costs, target_bytes, "prefix-cut")
            planned = min(planned, other, key=lambda one: one.timeline.peak_bytes)
        if not planned.fits and not (self.policy.name == "auto" and self._wants_the_least):
            raise VdnnError(
                f"policy {self.policy.name!r} has no plan under {format_bytes(target_bytes)}: the one it makes needs "
                f"{format_bytes(planned.timeline.peak_bytes)}. The policy 'auto' finds one from "
                f"{format_bytes(least_bytes(recording))} on."
            )
        self._require_host(planned.plan, target_bytes)
        return planned.plan

    def is_feasible(self, recording: Recording) -> bool:
        return least_bytes(recording) <= self.budget_bytes(recording)

    def target_bytes(self, recording: Recording, tightened_bytes: int = 0) -> int:
        """What the plan is to stay under."""
        return max(least_bytes(recording), self.budget_bytes(recording) - tightened_bytes)

    def budget_bytes(self, recording: Recording) -> int:
        if self.budget is not None:
            return self.budget.bytes_for(recording.device_bytes, least_bytes(recording))
        return int(recording.device_bytes * (1 if self.profile is not None else 1 - RESERVE))

    @property
    def _wants_the_least(self) -> bool:
        """Then what comes nearest to it will do: no plan is known that takes less."""
        return self.budget is not None and self.budget.nbytes is None and self.budget.share is None

    def costs(self, timeline: Timeline | None) -> LinkCosts:
        if self.profile is not None:
            return profile_costs(self.profile)
        return _ASSUMED_LINK if timeline is None else measured_costs(timeline, _ASSUMED_LINK)

    def _require_host(self, plan: Plan, budget_bytes: int) -> None:
        if self.host_bytes is not None and plan.offloaded_bytes > self.host_bytes:
            raise VdnnError(
                f"host_budget {format_bytes(self.host_bytes)} is too small: to stay under "
                f"{format_bytes(budget_bytes)} on the device {format_bytes(plan.offloaded_bytes)} have to leave it."
            )


def with_resident(recording: Recording, resident_bytes: int) -> Recording:
    """The same step, with so much allocated when it begins."""
    more_bytes = resident_bytes - recording.resident_bytes
    points = tuple(
        replace(point, allocated_bytes=point.allocated_bytes + more_bytes, peak_bytes=point.peak_bytes + more_bytes)
        for point in recording.points
    )
    return replace(recording, resident_bytes=resident_bytes, points=points)
