"""Policies of vdnn and of the paper it began with, each a file of its own; `planning.catalogue` has them by name."""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest

__all__ = ["OnlinePolicy", "PlanPolicy", "PlanRequest", "SaveFacts"]
