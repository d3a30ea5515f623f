"""vdnn: trains models whose activations do not fit the GPU, by moving them to pinned host memory and back.

All public names are defined here. `import vdnn` needs no torch, no GPU and no compiler. A name that needs torch raises
TorchMissingError on its first use if torch is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import BudgetError, VdnnError
from vdnn.requirements import require_core, require_torch
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline
from vdnn.user_warnings import VdnnWarning
from vdnn.version import __version__

if TYPE_CHECKING:
    from vdnn.advisor.advice import Advices
    from vdnn.advisor.examination import advise
    from vdnn.integrations.compile_options import compile_options
    from vdnn.planning.catalogue import register_policy
    from vdnn.planning.published.megengine_sublinear import SublinearConfig
    from vdnn.report.plan_report import PlanReport
    from vdnn.report.training_report import TrainingReport
    from vdnn.runtime.machine.virtual_machine import VirtualMachine
    from vdnn.runtime.rehearsal.plan_ahead import plan
    from vdnn.runtime.rehearsal.training_ahead import plan_training
    from vdnn.runtime.session.limits import Limits
    from vdnn.runtime.session.offload import keep, offload, paused
    from vdnn.runtime.session.save_on_cpu import save_on_cpu
    from vdnn.runtime.session.session import Session

__all__ = [
    "Advices",
    "BudgetError",
    "Limits",
    "Plan",
    "PlanReport",
    "Recording",
    "Session",
    "SublinearConfig",
    "Timeline",
    "TrainingReport",
    "VdnnError",
    "VdnnWarning",
    "VirtualMachine",
    "__version__",
    "advise",
    "compile_options",
    "format_bytes",
    "keep",
    "offload",
    "parse_bytes",
    "paused",
    "plan",
    "plan_training",
    "register_policy",
    "require_torch",
    "save_on_cpu",
]

# Names of the runtime. They are imported on their first use, so that `import vdnn` does not import torch.
_RUNTIME_NAMES = {
    "Limits": "vdnn.runtime.session.limits",
    "Session": "vdnn.runtime.session.session",
    "VirtualMachine": "vdnn.runtime.machine.virtual_machine",
    "advise": "vdnn.advisor.examination",
    "compile_options": "vdnn.integrations.compile_options",
    "keep": "vdnn.runtime.session.offload",
    "offload": "vdnn.runtime.session.offload",
    "paused": "vdnn.runtime.session.offload",
    "plan": "vdnn.runtime.rehearsal.plan_ahead",
    "plan_training": "vdnn.runtime.rehearsal.training_ahead",
    "save_on_cpu": "vdnn.runtime.session.save_on_cpu",
}


# Names of planning, which needs the native core but not torch.
_PLANNING_NAMES = {
    "Advices": "vdnn.advisor.advice",
    "PlanReport": "vdnn.report.plan_report",
    "SublinearConfig": "vdnn.planning.published.megengine_sublinear",
    "TrainingReport": "vdnn.report.training_report",
    "register_policy": "vdnn.planning.catalogue",
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
