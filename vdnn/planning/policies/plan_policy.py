"""What a policy that plans is given, and what it answers: the literature's, `auto`, and those of third parties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from vdnn.planning.costs import LinkCosts
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording


class PlanRequest(NamedTuple):
    """One recorded step, what moving its bytes costs, and what it must stay under; None: nothing is asked."""

    recording: Recording
    costs: LinkCosts
    budget_bytes: int | None


class PlanPolicy(ABC):
    """Chooses what leaves the device, when it is given up, and when it is asked back."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Who published it, or "vdnn"."""

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Of what the policy has nothing to say of budgets, a plan that may be over it: whoever asked looks. A policy
        that aims at the budget raises BudgetError where it cannot be met by anything at all."""
