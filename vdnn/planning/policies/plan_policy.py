"""The interface of plan policies, which make a Plan from a recording: `auto`, published ones, and third parties'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from vdnn.planning.costs import LinkCosts
from vdnn.planning.recomputing import recording_under
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording


class PlanRequest(NamedTuple):
    """One recorded step, the costs of copies, and the budget that the plan has to stay under (None: no budget)."""

    recording: Recording
    costs: LinkCosts
    budget_bytes: int | None


class PlanPolicy(ABC):
    """Chooses which storages are offloaded or recomputed, when they are released, and when they are reloaded."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The policy's name, as users write it."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The paper or project that published the policy, or "vdnn"."""

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """A plan for the recorded step. A policy that aims at the budget raises BudgetError if no plan can meet it. The
        plan of any other policy may be over the budget: plan_step() checks its peak."""

    @property
    def may_be_corrected(self) -> bool:
        """True: plan_step() releases storages earlier if a plan is over the budget, as far as that helps."""
        return False

    def are_sorted(self, request: PlanRequest) -> bool:
        """True if no candidate has a shorter step than those before it, as long as none of them is corrected."""
        return False

    def near(self, plan: Plan) -> PlanPolicy:
        """The policy for a step with the saves and uses of another one, which has this plan, but other sizes or another
        budget. A search begins from that plan, and ends earlier."""
        return self

    def candidates(self, request: PlanRequest) -> Iterator[Plan]:
        """Plans of which plan_step() takes the shortest under the budget. It asks for the next one only if none so far
        is as short as the computing of the step."""
        yield self.plan(request)

    def followed_candidates(self, request: PlanRequest) -> Iterator[tuple[Plan, Recording]]:
        """The same plans, each beside the step with its recomputes."""
        for plan in self.candidates(request):
            yield plan, recording_under(request.recording, plan.lifetimes)
