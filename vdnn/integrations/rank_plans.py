"""The stored plan of one rank: what the ranks agreed on in an earlier run of the same training, from a plan folder.

Each rank has a file of its own, in a folder for so many ranks inside of the plan folder. It is known by the number of
the rank besides what a session's file is known by (vdnn/runtime/steps/plan_store.py), and has the recorded step and the
plan. The ranks decide together whether they follow their files: see ranks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vdnn import _C
from vdnn.errors import FormatError, VdnnError
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN
from vdnn.runtime.session.plan_folders import plan_folder
from vdnn.runtime.steps.plan_store import PlanFolder, TrainingIdentity, card_facts, refused, structure_of
from vdnn.runtime.steps.plan_table import Source
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.stored_plans import Fact, StoredLadder, StoredPlans, StoredRecording, StoredRung

_CHANGING = (  # options that change plans
    "recompute",
    "lossy",
    "tolerance",
    "min_bytes",
    "parameters",
    "gradients",
    "optimizer_on",
    "optimizer_step",
    "integrity",
)


class RankPlans:
    """The file of this rank for a training of `model`, planned by `planner` with the `options` of vdnn.offload."""

    def __init__(
        self, path: Path, planner: BudgetPlanner, model: torch.nn.Module, options: Mapping[str, Any], device: Any
    ) -> None:
        changing = {name: options.get(name) for name in _CHANGING}
        changing["offloaded optimizers"] = "optimizer" in options
        recheck, integrity = options.get("recheck", DEFAULT_ONE_IN), options.get("integrity", False)
        finds_faults = options.get("tolerance") is None and (recheck > 0 or integrity)
        self._may_recompute = finds_faults and (isinstance(device, TensorDevice) or _C.device_code_present())
        self._planner = planner
        ranks = dist.get_world_size()
        path /= f"{ranks}-ranks"
        found = plan_folder(path, planner, changing, finds_faults=finds_faults)
        self._folder: PlanFolder | None = None if found is None else replace(found, ranks=ranks)
        rank = Fact("rank", f"{dist.get_rank()} of {ranks}")
        facts = () if found is None else found.facts
        self._training = TrainingIdentity(*structure_of(model), (rank, *_card(device), *facts))
        self.path = path / self._training.file_name

    def load(self) -> tuple[Plan | None, str]:
        """The plan of an earlier run; None with a sentence that says why there is none."""
        if self._folder is None:
            return None, "the plan folder cannot be written"
        found = self._folder.load(self._training)
        if found.plans is None:
            return None, found.sentence
        try:
            plan = _only_plan(self.path, found.plans)
            self._planner.require_host(plan)
        except VdnnError as error:  # a file that contradicts itself, or a plan that this host has no memory for
            return None, refused(f"{error} The ranks plan anew.").sentence
        if not self._may_recompute and any(one.is_recomputed for one in plan.lifetimes):
            return None, f"the stored plan in {self.path} recomputes, and nothing would prove that at its first use"
        return plan, ""

    def store(self, recording: Recording, plan: Plan) -> None:
        """Replaces the plan of this rank. If that is not possible, a warning says so."""
        if self._folder is None:
            return
        rung = StoredRung(0, plan, None, Source.RECORDED.value, 0, False, ())
        ladder = StoredLadder(False, False, (StoredRecording(0, True, False),), (rung,))
        self._folder.store(self._training, StoredPlans((recording,), (ladder,), (0,)))

    def forget(self) -> None:
        """Removes the plan of this rank: it is not that of its steps, or gave a wrong value."""
        if self._folder is not None:
            self._folder.forget(self._training)


def _only_plan(path: Path, plans: StoredPlans) -> Plan:
    rungs = [rung for ladder in plans.ladders for rung in ladder.rungs]
    if len(rungs) != 1:
        raise FormatError(where=str(path), problem=f"expected the one plan of a rank, got {len(rungs)}.")
    return rungs[0].plan


def _card(device: Any) -> tuple[Fact, Fact]:
    if isinstance(device, TensorDevice):
        device = device.device
    if isinstance(device, _C.Device):
        name, total_bytes = device.info.name, device.info.total_bytes
    else:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, total_bytes = properties.name, properties.total_memory
    return card_facts(str(name), total_bytes)
