"""Policies, each a file of its own, and the list of their names. Unknown names are answered with the list."""

from __future__ import annotations

from functools import partial

from vdnn.planning.policies.auto import Auto
from vdnn.planning.policies.auto_offload import AutoOffload
from vdnn.planning.policies.autoswap import AutoSwap, Score
from vdnn.planning.policies.capuchin import Capuchin
from vdnn.planning.policies.capuchin_full import CapuchinFull
from vdnn.planning.policies.chen_recursive import ChenRecursive
from vdnn.planning.policies.chen_sqrt import ChenSqrt
from vdnn.planning.policies.dtr import Dtr
from vdnn.planning.policies.keep_all import KeepAll, KeepAllPlan
from vdnn.planning.policies.largest_first import LargestFirst
from vdnn.planning.policies.megengine_sublinear import MegengineSublinear
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.prefix_cut import PrefixCut
from vdnn.planning.policies.rebuild_all import RebuildAll
from vdnn.planning.policies.registry import (
    has_online,
    has_planner,
    make_planner,
    make_policy,
    planner_names,
    policy_names,
    register_policy,
)
from vdnn.planning.policies.sublinear_config import SublinearConfig
from vdnn.planning.policies.swapadvisor import SwapAdvisor
from vdnn.planning.policies.tflms import Tflms
from vdnn.planning.policies.vdnn_all import VdnnAll, VdnnAllPlan
from vdnn.planning.policies.vdnn_conv import VdnnConv, VdnnConvPlan
from vdnn.planning.policies.vdnn_dyn import VdnnDyn

register_policy("auto", planner=Auto)
register_policy("auto-offload", planner=AutoOffload)
register_policy("keep", online=KeepAll, planner=KeepAllPlan)
register_policy("vdnn-all", online=VdnnAll, planner=VdnnAllPlan)
register_policy("vdnn-conv", online=VdnnConv, planner=VdnnConvPlan)
register_policy("rebuild-all", online=RebuildAll)
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

__all__ = [
    "MegengineSublinear",
    "OnlinePolicy",
    "PlanPolicy",
    "PlanRequest",
    "SaveFacts",
    "SublinearConfig",
    "has_online",
    "has_planner",
    "make_planner",
    "make_policy",
    "planner_names",
    "policy_names",
    "register_policy",
]
