"""vdnn: trains models whose activations do not fit the GPU, by moving them to pinned host memory and back.

Public names live here and nowhere else. Importing this package needs no torch, no GPU and no compiler; a name
that needs torch says so when it is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.core_requirement import require_core
from vdnn.errors import BudgetError, VdnnError
from vdnn.recording import Recording
from vdnn.step_plan import Plan
from vdnn.timeline import Timeline
from vdnn.torch_requirement import require_torch

if TYPE_CHECKING:
    from vdnn.advisor.advices import Advices
    from vdnn.advisor.examination import advise
    from vdnn.planning.policies import SublinearConfig, register_policy
    from vdnn.report.plan_report import PlanReport
    from vdnn.runtime.offload import keep, offload, paused
    from vdnn.runtime.plan_ahead import plan
    from vdnn.runtime.save_on_cpu import save_on_cpu
    from vdnn.runtime.session import Session
    from vdnn.runtime.virtual_machine import VirtualMachine

__version__ = "0.1.0.dev0"

__all__ = [
    "Advices",
    "BudgetError",
    "Plan",
    "PlanReport",
    "Recording",
    "Session",
    "SublinearConfig",
    "Timeline",
    "VdnnError",
    "VirtualMachine",
    "__version__",
    "advise",
    "format_bytes",
    "keep",
    "offload",
    "parse_bytes",
    "paused",
    "plan",
    "register_policy",
    "require_torch",
    "save_on_cpu",
]

# Names of the runtime. They are looked up when touched, so that `import vdnn` never imports torch.
_RUNTIME_NAMES = {
    "Session": "vdnn.runtime.session",
    "VirtualMachine": "vdnn.runtime.virtual_machine",
    "advise": "vdnn.advisor.examination",
    "keep": "vdnn.runtime.offload",
    "offload": "vdnn.runtime.offload",
    "paused": "vdnn.runtime.offload",
    "plan": "vdnn.runtime.plan_ahead",
    "save_on_cpu": "vdnn.runtime.save_on_cpu",
}


# Names of planning, which needs the native core and no torch.
_PLANNING_NAMES = {
    "Advices": "vdnn.advisor.advices",
    "PlanReport": "vdnn.report.plan_report",
    "SublinearConfig": "vdnn.planning.policies",
    "register_policy": "vdnn.planning.policies",
}


def __getattr__(name: str) -> object:
    if name in _PLANNING_NAMES:
        require_core()
        return getattr(importlib.import_module(_PLANNING_NAMES[name]), name)
    if name in _RUNTIME_NAMES:
        require_torch()
        require_core()
        return getattr(importlib.import_module(_RUNTIME_NAMES[name]), name)
    raise AttributeError(f"module 'vdnn' has no attribute {name!r}")
