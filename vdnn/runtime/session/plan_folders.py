"""The plan folder of a session, from the arguments of vdnn.offload."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from vdnn.bytesize import exact_bytes
from vdnn.planning.policies import PlanPolicy
from vdnn.runtime.steps.plan_store import PlanFolder
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.step.stored_plans import Fact
from vdnn.version import __version__


def path_of(plans: object) -> Path | None:
    """The folder that a user named. Raises TypeError or ValueError for any other value."""
    if plans is None:
        return None
    if not isinstance(plans, (str, os.PathLike)):
        raise TypeError(f"plans: expected the path of a folder, got {type(plans).__name__}.")
    if not os.fspath(plans):
        raise ValueError("plans: expected the path of a folder, got an empty text.")
    return Path(os.fsdecode(plans)).expanduser()


def plan_folder(
    path: Path, planner: BudgetPlanner, options: Mapping[str, object], *, finds_faults: bool
) -> PlanFolder | None:
    """The folder for a session with this planner, whose `options` change its plans; None, with a warning, if it cannot
    be written. `finds_faults`: rechecks are on, and no tolerance is given."""
    if not _is_usable(path):
        return None
    facts = (
        Fact("budget", _text_of(planner)),
        Fact("policy", _name_of(planner.policy)),
        *(Fact(name, str(value)) for name, value in options.items()),
    )
    return PlanFolder(path, __version__, facts, follows_recomputes=finds_faults)


@functools.cache
def _is_usable(path: Path) -> bool:
    return PlanFolder(path, __version__).is_usable


def _text_of(planner: BudgetPlanner) -> str:
    budget = planner.budget
    if budget is None:
        return "the memory of the device"
    return str(budget) if budget.nbytes is None else exact_bytes(budget.nbytes)


def _name_of(policy: PlanPolicy) -> str:
    """Policies of the user are told apart by their classes, too."""
    return f"{policy.name} ({type(policy).__module__}.{type(policy).__qualname__})"
