"""Registers every built-in policy under its name: ours, those of the vDNN paper, and other published ones.

This is the only module that imports `planning.published`: no search depends on a published policy.
"""

from __future__ import annotations

from functools import partial

from vdnn.planning.policies.keep_all import KeepAll, KeepAllPlan
from vdnn.planning.policies.plan_policy import PlanPolicy
from vdnn.planning.policies.recompute_all import RecomputeAll
from vdnn.planning.policies.registry import (
    has_online,
    has_planner,
    make_planner,
    make_policy,
    planner_names,
    policy_names,
    register_policy,
)
from vdnn.planning.policies.vdnn_all import VdnnAll, VdnnAllPlan
from vdnn.planning.policies.vdnn_conv import VdnnConv, VdnnConvPlan
from vdnn.planning.policies.vdnn_dyn import VdnnDyn
from vdnn.planning.published.autoswap import AutoSwap, Score
from vdnn.planning.published.capuchin import Capuchin
from vdnn.planning.published.capuchin_full import CapuchinFull
from vdnn.planning.published.chen_recursive import ChenRecursive
from vdnn.planning.published.chen_sqrt import ChenSqrt
from vdnn.planning.published.dtr import Dtr
from vdnn.planning.published.largest_first import LargestFirst
from vdnn.planning.published.megengine_sublinear import MegengineSublinear
from vdnn.planning.published.swapadvisor import SwapAdvisor
from vdnn.planning.published.tflms import Tflms
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.search.effort import QUICK
from vdnn.planning.search.prefix_cut import PrefixCut

__all__ = [
    "has_online",
    "has_planner",
    "make_planner",
    "make_policy",
    "make_quick_planner",
    "planner_names",
    "policy_names",
    "register_policy",
]

register_policy("auto", planner=Auto)
register_policy("auto-offload", planner=AutoOffload)
register_policy("keep", online=KeepAll, planner=KeepAllPlan)
register_policy("vdnn-all", online=VdnnAll, planner=VdnnAllPlan)
register_policy("vdnn-conv", online=VdnnConv, planner=VdnnConvPlan)
register_policy("recompute-all", online=RecomputeAll)
register_policy("vdnn-dyn", planner=VdnnDyn)
register_policy("prefix-cut", planner=PrefixCut)
register_policy("largest-first", planner=LargestFirst)
register_policy("capuchin", planner=Capuchin)
register_policy("tflms", planner=Tflms)
register_policy("autoswap-doa", planner=partial(AutoSwap, Score.DOA))
register_policy("autoswap-aoa", planner=partial(AutoSwap, Score.AOA))
register_policy("autoswap-wdoa", planner=partial(AutoSwap, Score.WDOA))
register_policy("autoswap-swdoa", planner=partial(AutoSwap, Score.SWDOA))
register_policy("swapadvisor", planner=SwapAdvisor)
register_policy("chen-sqrt", planner=ChenSqrt)
register_policy("chen-recursive", planner=ChenRecursive)
register_policy("megengine-sublinear", planner=MegengineSublinear)
register_policy("capuchin-full", planner=CapuchinFull)
register_policy("dtr", planner=Dtr)


def make_quick_planner(policy: str | PlanPolicy) -> PlanPolicy:
    """The planner of a session, whose training waits for each plan: `auto` searches quickly."""
    return Auto(QUICK) if policy == "auto" else make_planner(policy)
