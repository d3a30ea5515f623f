"""Plans a recorded step for the user's budget, on the device that it ran on.

Without a budget the plan may use the memory of the device, less a reserve. Refuses budgets that cannot be met, and
plans that do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.planning.budget import Budget, bytes_without_budget
from vdnn.planning.costs import LinkCosts, measured_costs, profile_costs
from vdnn.planning.least_memory import as_if_feasible, least_bytes, require_feasible_budget
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

# The share of the budget that plans leave free. A step that grows by a few bytes (a metric that is kept) still fits.
SLACK = 0.01
# The rates that are assumed if no copy was measured: those of large copies of pinned memory over PCIe gen 4.
_ASSUMED_LINK = LinkCosts(24e9, 24e9, 42e9, 10_000)


@dataclass(frozen=True, slots=True)
class BudgetPlanner:
    """`profile`: of a machine that is not present. `budget` None: the memory of the device, less the reserve."""

    policy: PlanPolicy
    budget: Budget | None
    host_bytes: int | None
    profile: HardwareProfile | None

    def planned(
        self, recording: Recording, timeline: Timeline | None, tightened_bytes: int = 0, *, where_possible: bool = False
    ) -> PlannedStep:
        """Make a plan for `tightened_bytes` less than the budget. The link's rates are measured from the copies in
        `timeline`, the recorded step's. Raises BudgetError, or VdnnError if the policy has no plan that fits. With
        `where_possible` it meets the budget in all intervals of the step in which a plan can."""
        costs, budget_bytes = self.costs(timeline), self.budget_bytes(recording)
        if where_possible:
            recording = as_if_feasible(recording, budget_bytes)
        require_feasible_budget(recording, budget_bytes)
        target_bytes = self.target_bytes(recording, tightened_bytes)
        # For the budget "min" the plan with the lowest peak is accepted.
        must_fit = not (self.policy.name == "auto" and self.wants_the_least)
        planned = plan_step(recording, costs, target_bytes, self.policy, must_fit=must_fit)
        self.require_host(planned.plan, target_bytes)
        return planned

    def is_feasible(self, recording: Recording) -> bool:
        return least_bytes(recording) <= self.budget_bytes(recording)

    def target_bytes(self, recording: Recording, tightened_bytes: int = 0) -> int:
        """The peak that the plan may reach: the budget less the slack, unless that is too little. A step that fits
        the whole budget moves nothing."""
        budget_bytes = self.budget_bytes(recording)
        if self.budget is not None and recording.peak_bytes > budget_bytes:  # a reserve is larger than the slack
            budget_bytes = int(budget_bytes * (1 - SLACK))
        return max(least_bytes(recording), budget_bytes - tightened_bytes)

    def budget_bytes(self, recording: Recording) -> int:
        fixed_bytes = self.fixed_bytes(recording.device_bytes)
        return min(least_bytes(recording), recording.device_bytes) if fixed_bytes is None else fixed_bytes

    def fixed_bytes(self, device_bytes: int) -> int | None:
        """The budget of every step on a device of `device_bytes`; None for "min", which depends on the step."""
        if self.budget is None:
            return bytes_without_budget(device_bytes)
        return self.budget.fixed_bytes(device_bytes)

    @property
    def wants_the_least(self) -> bool:
        """True for the budget "min"."""
        return self.budget is not None and self.budget.nbytes is None and self.budget.share is None

    def costs(self, timeline: Timeline | None) -> LinkCosts:
        if self.profile is not None:
            return profile_costs(self.profile)
        return _ASSUMED_LINK if timeline is None else measured_costs(timeline, _ASSUMED_LINK)

    def require_host(self, plan: Plan, budget_bytes: int | None = None) -> None:
        """Raises VdnnError if a plan, which was made for this budget, offloads more than the host may take."""
        if self.host_bytes is not None and plan.offloaded_bytes > self.host_bytes:
            budget = "its budget" if budget_bytes is None else format_bytes(budget_bytes)
            raise VdnnError(
                f"host_budget {format_bytes(self.host_bytes)} is too small: to stay under {budget} on the device "
                f"{format_bytes(plan.offloaded_bytes)} have to be offloaded."
            )
