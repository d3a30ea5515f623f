"""Saves plans made ahead of training into a run: their steps, and the cells that compare them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from vdnn.bytesize import format_bytes
from vdnn.report.cell import Cell
from vdnn.report.comparison import peer_of_policy
from vdnn.report.plan_report import PlanReport
from vdnn.report.run_folder import TRAININGS_FOLDER, append_cells
from vdnn.report.training_report import TrainingReport
from vdnn.step.saved_step import Reason, Reasons, SavedStep
from vdnn.step.timeline import Track
from vdnn.version import __version__

_NO_FOLDER_NAME = re.compile(r"[^A-Za-z0-9._%+=-]+")


def save_plan_reports(
    run: str | os.PathLike[str], reports: Sequence[PlanReport], *, budget: str | None, card_bytes: int
) -> None:
    """Save reports on one step under several policies and one budget, on a card with `card_bytes` of memory. The same
    run may also have plans for other budgets."""
    cells = [_plain_cell(reports[0], card_bytes)]
    for report in reports:
        step = _step_of(report, budget)
        step.save(run)
        cells.append(_planned_cell(report, budget, step.name))
    append_cells(run, cells)


def save_training_report(run: str | os.PathLike[str], report: TrainingReport) -> Path:
    """Add the plan of a whole training to a run. A plan of the same training under the same budget is replaced."""
    parts = (report.model.rpartition(":")[2], str(report.batch or ""), report.hardware, str(report.budget_bytes))
    folder = Path(run) / TRAININGS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("-".join(_NO_FOLDER_NAME.sub("_", part) for part in parts if part).lstrip(".") + ".json")
    report.save(path)
    return path


def _step_of(report: PlanReport, budget: str | None) -> SavedStep:
    planned = report.planned
    reasons = tuple(Reason(one.lifetime, one.second_best, one.more_ns) for one in report.storages)
    parts = (_workload(report), str(report.batch or ""), report.hardware, planned.plan.policy, budget or "all")
    name = "-".join(_NO_FOLDER_NAME.sub("_", part) for part in parts if part).lstrip(".")
    return SavedStep(
        name,
        planned.recording,
        planned.plan,
        planned.timeline,
        report.executed,
        Reasons(reasons) if reasons else None,
    )


def _workload(report: PlanReport) -> str:
    return report.model.rpartition(":")[2]


def _versions(report: PlanReport) -> dict[str, str]:
    return {"vdnn": __version__, "torch": report.planned.recording.torch_version}


def _plain_cell(report: PlanReport, card_bytes: int) -> Cell:
    recording = report.planned.recording
    fits = recording.peak_bytes <= card_bytes
    return Cell(
        _workload(report),
        "plain",
        status="ok" if fits else "out-of-memory",
        batch=report.batch,
        place="virtual",
        device=report.hardware,
        clock=recording.clock,
        said="" if fits else f"needs {format_bytes(recording.peak_bytes)} of {format_bytes(card_bytes)}",
        step_ns=recording.kept_ns,
        peak_bytes=recording.peak_bytes,
        compiled=False,
        versions=_versions(report),
    )


def _planned_cell(report: PlanReport, budget: str | None, step: str) -> Cell:
    planned = report.planned
    shown = report.shown
    return Cell(
        _workload(report),
        peer_of_policy(planned.plan.policy),
        batch=report.batch,
        budget=budget,
        budget_bytes=planned.plan.budget_bytes,
        place="virtual",
        device=report.hardware,
        clock=planned.recording.clock,
        said="" if shown is report.executed else "not run: predicted",
        step_ns=shown.step_ns,
        peak_bytes=shown.peak_bytes,
        host_bytes=report.host_bytes,
        to_host_bytes=shown.copied_bytes(Track.TO_HOST),
        to_device_bytes=shown.copied_bytes(Track.TO_DEVICE),
        stall_ns=shown.stall_ns,
        predicted_step_ns=planned.timeline.step_ns,
        predicted_peak_bytes=planned.timeline.peak_bytes,
        versions=_versions(report),
        step=step,
    )
