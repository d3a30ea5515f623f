"""Policies, each a file of its own, and the list of their names. Unknown names are answered with the list."""

from __future__ import annotations

from vdnn.planning.policies.auto import Auto
from vdnn.planning.policies.keep_all import KeepAll, KeepAllPlan
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.prefix_cut import PrefixCut
from vdnn.planning.policies.registry import (
    has_online,
    has_planner,
    make_planner,
    make_policy,
    planner_names,
    policy_names,
    register_policy,
)
from vdnn.planning.policies.vdnn_all import VdnnAll
from vdnn.planning.policies.vdnn_conv import VdnnConv

register_policy("auto", planner=Auto)
register_policy("keep", online=KeepAll, planner=KeepAllPlan)
register_policy("vdnn-all", online=VdnnAll)
register_policy("vdnn-conv", online=VdnnConv)
register_policy("prefix-cut", planner=PrefixCut)

__all__ = [
    "OnlinePolicy",
    "PlanPolicy",
    "PlanRequest",
    "SaveFacts",
    "has_online",
    "has_planner",
    "make_planner",
    "make_policy",
    "planner_names",
    "policy_names",
    "register_policy",
]
