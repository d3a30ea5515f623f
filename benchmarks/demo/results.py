"""Writes the results of the demo, all or nothing: a run for `vdnn report`, its page, and the picture."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.demo.devices import Measured
from benchmarks.demo.picture import DrawnStep, draw_steps
from benchmarks.demo.training import STEP_NAME, SideBySide, TrainingRun
from benchmarks.harness.provenance import commit_of_tree, versions_of
from vdnn.bytesize import format_bytes
from vdnn.hardware import load_profile
from vdnn.report import Cell, append_cells, write_html
from vdnn.report.plan_report import PlanReport
from vdnn.report.saved_plan import save_plan_reports
from vdnn.step.timeline import Timeline, Track

RUN, PAGE, PICTURE = "run", "report.html", "memory.png"


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to. Its entries replace those of `folder` after the block. If the block raises or Ctrl-C
    stops it, `folder` is unchanged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
        made, replaced = Path(unfinished) / "made", Path(unfinished) / "replaced"
        made.mkdir()
        replaced.mkdir()
        yield made
        folder.mkdir(exist_ok=True)
        for entry in sorted(made.iterdir()):
            target = folder / entry.name
            if target.is_dir():  # a move does not replace a folder
                target.rename(replaced / entry.name)
            entry.replace(target)


def write_results(folder: Path, trained: SideBySide, planned: PlanReport, budget: str) -> None:
    """Writes the run, its page and the picture to an empty folder."""
    run = folder / RUN
    trained.step.save(run)
    append_cells(run, _cells(trained))
    card_bytes = load_profile(planned.hardware).memory_bytes
    save_plan_reports(run, [planned], budget=budget, card_bytes=card_bytes)
    draw_steps(_drawn(trained, planned), folder / PICTURE)
    write_html(run, folder / PAGE)


def _drawn(trained: SideBySide, planned: PlanReport) -> list[DrawnStep]:
    steps = []
    if trained.step.recording is not None and trained.step.measured is not None:
        title = f"a small GPT, trained on a {trained.shown_name}"
        steps.append(DrawnStep(title, trained.step.recording, trained.step.measured, trained.budget_bytes))
    timeline = planned.executed or planned.planned.timeline
    budget_bytes = planned.planned.plan.budget_bytes
    if budget_bytes is not None:
        title = f"VGG-16 ({planned.batch}), planned for a {planned.hardware}"
        steps.append(DrawnStep(title, planned.planned.recording, timeline, budget_bytes))
    return steps


def _cells(trained: SideBySide) -> list[Cell]:
    """Returns the cells of the plain run and of the run under the budget."""
    plain = _last(trained.plain)
    ours = _last(trained.ours)
    timeline = trained.step.measured
    name = f"gpt_{trained.size.layers}x{trained.size.width}"
    return [
        _cell(trained, name, "plain", plain, trained.plain),
        _cell(trained, name, "vdnn-auto", ours, trained.ours, timeline),
    ]


def _cell(
    trained: SideBySide,
    workload: str,
    peer: str,
    measured: Measured | None,
    run: TrainingRun,
    timeline: Timeline | None = None,
) -> Cell:
    is_ours = timeline is not None
    return Cell(
        workload,
        peer,
        batch=trained.size.batch,
        budget=format_bytes(trained.budget_bytes) if is_ours else None,
        budget_bytes=trained.budget_bytes if is_ours else None,
        place=trained.cell_place,
        device=trained.device_name,
        clock=trained.clock,
        step_ns=None if measured is None else measured.step_ns,
        peak_bytes=None if measured is None else measured.peak_bytes,
        to_host_bytes=None if timeline is None else timeline.copied_bytes(Track.TO_HOST),
        to_device_bytes=None if timeline is None else timeline.copied_bytes(Track.TO_DEVICE),
        stall_ns=None if timeline is None else timeline.stall_ns,
        loss=repr(run.losses[-1]),
        identical=not trained.different_tensors if is_ours else None,
        versions=versions_of(),
        commit=commit_of_tree(),
        step=STEP_NAME if is_ours else None,
    )


def _last(run: TrainingRun) -> Measured | None:
    return run.measured[-1]
