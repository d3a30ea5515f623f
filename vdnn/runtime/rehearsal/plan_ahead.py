"""vdnn.plan: says whether a model fits a card and what a step takes, before any run and on any machine.

It rehearses the model's step without data on the named hardware, plans it, and runs the plan in virtual time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vdnn.errors import BudgetError, VdnnError
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.planning.budget import bytes_without_budget, parse_budget
from vdnn.planning.catalogue import make_planner
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.least_memory import least_bytes, smaller_state
from vdnn.planning.memory_kinds import memory_kinds
from vdnn.planning.planned_step import PlannedStep, note_on, plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.planning.second_best import explain
from vdnn.report.plan_report import LibraryMemory, PlanReport
from vdnn.runtime.machine.workspaces import Workspace
from vdnn.runtime.rehearsal.host_probe import host_of
from vdnn.runtime.rehearsal.rehearsal import Rehearsal, Subject, rehearse, subject_of
from vdnn.step.recording import Recording

_STATE = "Parameters, gradients and optimizer state"


def plan(
    model: torch.nn.Module | Callable[[int], Any],
    batch: Any,
    *,
    hardware: str | os.PathLike[str] | HardwareProfile = "h100",
    budget: int | str | None = None,
    policy: str | PlanPolicy = "auto",
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
    explains: int = 0,
    host_speed: float | str = 1.0,
) -> PlanReport:
    """Plans a training step of `model` for `hardware`, which need not be present.

    * `model`: a module, or a function of a batch size that makes one and its inputs.
    * `batch`: a batch of the module's inputs (a tensor, or a tuple or dict of arguments), or the batch size.
    * `hardware`: the name of a profile, the path of one, or a HardwareProfile.
    * `budget`: "12GiB", "80%" of the card, or "min" for the least. Default: 90 % of the card, as in training.
    * `policy`: the name of a plan policy, or a policy of your own.
    * `loss`: a function of the model's output. Default: the output's `loss`, or else the sum of its squares.
    * `optimizer`: "sgd", "momentum" or "adamw" adds the optimizer's state and its step.
    * `min_bytes`: smaller saves stay on the device.
    * `explains`: the number of the largest storages for which the report says why they got their actions.
    * `host_speed`: how many times as fast as the profile's host yours is; "measured" takes the host of this machine.

        report = vdnn.plan(make_model, 256, hardware="titan-x", budget="min")
        print(report)
    """
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "model")
    return compare(
        subject_of(model, batch, loss),
        [policy],
        name=name,
        batch=batch if isinstance(batch, int) else None,
        hardware=hardware,
        budget=budget,
        optimizer=optimizer,
        min_bytes=min_bytes,
        explains=explains,
        host_speed=host_speed,
    )[0]


def compare(
    subject: Subject,
    policies: Sequence[str | PlanPolicy],
    *,
    name: str,
    batch: int | None,
    hardware: str | os.PathLike[str] | HardwareProfile,
    budget: int | str | None = None,
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
    certify: bool = True,
    runs: bool = True,
    explains: int = 0,
    host_speed: float | str = 1.0,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> list[PlanReport]:
    """Plans one step under several policies, one report for each. With `runs`, each plan also runs in virtual time.
    `on_progress` is called with a phrase before each phase. For the other arguments, see plan()."""
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    planners = [make_planner(policy) for policy in policies]  # refuse an unknown name before the rehearsal
    host = host_of(profile, host_speed)
    wanted = None if budget is None else parse_budget(budget)
    on_progress("rehearsing the step")
    rehearsal = rehearse(subject, profile, host=host, optimizer=optimizer, min_bytes=min_bytes)
    recording, costs = rehearsal.recording, profile_costs(profile, host)
    _require_bfloat16(profile, recording)
    budget_bytes = bytes_without_budget(profile.memory_bytes)
    if wanted is not None:
        budget_bytes = wanted.bytes_for(profile.memory_bytes, least_bytes(recording))
    memory = memory_kinds(
        recording,
        parameter_bytes=rehearsal.parameter_bytes,
        gradient_bytes=rehearsal.gradient_bytes,
        optimizer_bytes=rehearsal.optimizer_bytes,
    )
    reports = []
    for planner in planners:
        on_progress(f"{'planning and certifying' if certify else 'planning'}: {planner.name}")
        planned = _planned(rehearsal, costs, budget_bytes, planner, certify=certify)
        run = None
        if runs:
            on_progress(f"running under the plan: {planner.name}")
            run = rehearse(
                subject, profile, plan=planned.plan, optimizer=optimizer, min_bytes=min_bytes, after=rehearsal
            )
        storages = explain(planned, costs, explains) if explains else ()
        stand_ins = tuple(map(str, rehearsal.stand_ins))
        reports.append(
            PlanReport(
                name,
                batch,
                profile.name,
                planned,
                memory,
                None if run is None else run.timeline,
                note_on(planned, costs),
                storages,
                stand_ins,
                _libraries(profile, rehearsal, run),
            )
        )
    return reports


def _require_bfloat16(profile: HardwareProfile, recording: Recording) -> None:
    """Raises VdnnError if the step saves bfloat16 and the card does not compute in it. Cards do since Ampere."""
    if "bfloat16" not in profile.flop_per_s and any(
        point.key is not None and point.key.dtype == "bfloat16" for point in recording.points
    ):
        raise VdnnError(
            f"plan: {profile.name} does not compute in bfloat16, which the step asks for: use float16 or float32, or "
            "plan for a card of Ampere or newer."
        )


def _libraries(profile: HardwareProfile, rehearsal: Rehearsal, run: Rehearsal | None) -> LibraryMemory:
    reserved = None if run is None else run.reserved
    return LibraryMemory(
        0 if rehearsal.workspace is None else rehearsal.workspace.nbytes,
        str(rehearsal.workspace or ""),
        profile.libraries.get("cublas_bytes", 0),
        profile.libraries.get("context_bytes", 0),
        None if reserved is None else reserved.in_segments,
        None if reserved is None else reserved.in_expandable_segments,
        profile.memory_bytes,
    )


def _planned(
    rehearsal: Rehearsal, costs: LinkCosts, budget_bytes: int, planner: PlanPolicy, *, certify: bool
) -> PlannedStep:
    """plan_step(), whose refusal also knows the bytes that no plan moves."""
    try:
        return plan_step(rehearsal.recording, costs, budget_bytes, planner, certify=certify)
    except BudgetError as refused:
        state_bytes = rehearsal.parameter_bytes + rehearsal.gradient_bytes + rehearsal.optimizer_bytes
        raise BudgetError(
            budget_bytes=refused.budget_bytes,
            least_bytes=refused.least_bytes,
            where=_with_workspace(refused, rehearsal.workspace),
            resident_bytes=refused.resident_bytes,
            way_out=smaller_state(_STATE, state_bytes, budget_bytes, refused.least_bytes) or refused.way_out,
        ) from None


def _with_workspace(refused: BudgetError, workspace: Workspace | None) -> str:
    """The place of the peak, with the largest workspace if the step might meet the budget without it."""
    if workspace is None or refused.least_bytes - workspace.nbytes > refused.budget_bytes:
        return refused.where
    return f"{refused.where} (with workspaces of libraries, the largest up to {workspace})"
