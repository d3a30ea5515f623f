"""Policies of vdnn and of the vDNN paper, each in a file of its own. `planning.catalogue` registers them by name."""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest

__all__ = ["OnlinePolicy", "PlanPolicy", "PlanRequest", "SaveFacts"]
