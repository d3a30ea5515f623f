"""A run for tests of reports: a small network's virtual steps, planned and executed under several budgets."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn

from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.memory_kinds import memory_kinds
from vdnn.planning.planned_step import plan_step
from vdnn.planning.second_best import explain
from vdnn.report.plan_report import PlanReport
from vdnn.report.run_folder import Run, read_run
from vdnn.report.saved_plan import save_plan_reports
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline

BATCH = 16
BUDGETS = (80, 50)  # per cent of the peak with everything kept


def network(batch: int) -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Dropout(0.5)]
    return nn.Sequential(*layers), torch.empty(batch, 3, 64, 64)


@functools.cache
def reports(hardware: str = "titan-x") -> tuple[PlanReport, ...]:
    """One report for each budget."""
    subject, profile = subject_of(network, BATCH), load_profile(hardware)
    rehearsal, costs = rehearse(subject, profile, min_bytes=0), profile_costs(profile)
    memory = memory_kinds(
        rehearsal.recording,
        parameter_bytes=rehearsal.parameter_bytes,
        gradient_bytes=rehearsal.gradient_bytes,
        optimizer_bytes=0,
    )
    made = []
    for share in BUDGETS:
        planned = plan_step(rehearsal.recording, costs, rehearsal.recording.peak_bytes * share // 100)
        executed = rehearse(subject, profile, plan=planned.plan, min_bytes=0).timeline
        why = explain(planned, costs, 3)
        made.append(PlanReport("tests:network", BATCH, hardware, planned, memory, executed, None, why))
    return tuple(made)


def saved_run(folder: Path, hardware: str = "titan-x") -> Run:
    """The run of these reports, written to a folder and read back."""
    card_bytes = load_profile(hardware).memory_bytes
    for report, share in zip(reports(hardware), BUDGETS, strict=True):
        save_plan_reports(folder, [report], budget=f"{share}%", card_bytes=card_bytes)
    return read_run(folder)


def tightest() -> SavedStep:
    """The step under the smallest budget, with all its parts."""
    report = reports()[-1]
    return SavedStep(
        "tightest", report.planned.recording, report.planned.plan, report.planned.timeline, report.executed
    )


def parts(step: SavedStep) -> tuple[Recording, Plan, Timeline]:
    """The recording, plan and timeline of a step that has all three."""
    timeline = step.measured or step.predicted
    assert step.recording is not None
    assert step.plan is not None
    assert timeline is not None
    return step.recording, step.plan, timeline
