"""Makes the pictures of a run, and lists why a picture cannot be drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vdnn.report.comparison import Comparison, cells_of_run, comparisons
from vdnn.report.drawing import Picture, require_matplotlib
from vdnn.report.headline import named_points
from vdnn.report.memory_over_step import kept_and_planned_picture, memory_picture
from vdnn.report.palette import looks_of
from vdnn.report.prediction import peaks_of, prediction_picture, times_of
from vdnn.report.run_folder import Run, read_run
from vdnn.report.step_timeline import timeline_picture
from vdnn.report.trade_off import trade_off_picture
from vdnn.report.training_pictures import training_pictures
from vdnn.step.saved_step import SavedStep

FEWEST_POINTS = 3  # of a scatter: a table shows fewer as well


@dataclass(frozen=True, slots=True)
class Figures:
    """The pictures of a run. `left_out` has a sentence with the reason for each picture that cannot be drawn.

    A workload whose cells are too few for a trade-off has a `leading` picture of one step instead, if it has a step.
    `compared` has the comparisons of the trade-offs.
    """

    trade_offs: tuple[Picture, ...]
    prediction: Picture | None
    steps: dict[str, tuple[Picture, ...]]  # by the step's name
    left_out: tuple[str, ...]
    trainings: tuple[tuple[Picture, ...], ...] = ()
    leading: tuple[Picture, ...] = ()
    compared: tuple[Comparison, ...] = ()

    @property
    def all(self) -> tuple[Picture, ...]:
        of_run = (*self.leading, *self.trade_offs, *(() if self.prediction is None else (self.prediction,)))
        grouped = (*self.steps.values(), *self.trainings)
        return (*of_run, *(picture for pictures in grouped for picture in pictures))


def figures_of(run: Run) -> Figures:
    """Choose the pictures of a run. This draws nothing."""
    cells, compared = cells_of_run(run), comparisons(run)
    looks = looks_of(cells)
    left_out = []
    trade_offs = []
    leading = tuple(_leading(run, compared))
    led = {picture.workload for picture in leading}
    shown = tuple(one for one in compared if one.measured and one.workload not in led)
    for comparison in compared:
        if comparison in shown:
            trade_offs.append(trade_off_picture(comparison, looks))
        elif not comparison.measured:
            left_out.append(f"Memory against time of {comparison.name}: none of its cells was measured.")
    if not compared and not run.trainings:
        left_out.append("Memory against time: the run has no cells.")
    predicted = max(len(times_of(cells)), len(peaks_of(cells)))
    prediction = prediction_picture(cells) if predicted >= FEWEST_POINTS else None
    if not predicted and not run.trainings:
        left_out.append("Prediction against measurement: no cell was both predicted and measured.")
    steps = {}
    for step in run.steps:
        steps[step.name] = tuple(_pictures_of_step(run, step, left_out))
    if not run.steps and not run.trainings:
        left_out.append("Memory over a step, and its timeline: the run has no steps/.")
    trainings = tuple(training_pictures(one) for one in run.trainings)
    return Figures(tuple(trade_offs), prediction, steps, tuple(left_out), trainings, leading, shown)


def opened_steps(run: Run, compared: Sequence[Comparison]) -> set[str]:
    """For each workload the step that the headline names, else the first step of vdnn, else the first step."""
    named = {point.cell.step for point in named_points(compared)}
    best: dict[str, tuple[int, str]] = {}
    for step in run.steps:
        cell = run.cell_of(step)
        rank = 0 if step.name in named else 1 if cell is None or cell.is_vdnn else 2
        workload = run.workload_of(step)
        if workload not in best or rank < best[workload][0]:
            best[workload] = rank, step.name
    return {name for _, name in best.values()}


def _leading(run: Run, compared: Sequence[Comparison]) -> Iterator[Picture]:
    opened = opened_steps(run, compared)
    crowded = {one.workload for one in compared if len(one.measured) >= FEWEST_POINTS}
    for step in run.steps:
        if step.name in opened and run.workload_of(step) not in crowded:
            cell = run.cell_of(step)
            budget_bytes = None if cell is None else cell.budget_bytes
            picture = kept_and_planned_picture(step, run.workload_of(step), run.title_of(step), budget_bytes)
            if picture is not None:
                yield picture


def _pictures_of_step(run: Run, step: SavedStep, left_out: list[str]) -> list[Picture]:
    workload, title = run.workload_of(step), run.title_of(step)
    pictures = []
    if step.recording is not None and step.recording.points:
        pictures.append(memory_picture(step, workload, title))
    else:
        left_out.append(f"Memory over the step {step.name}: it has no recording.json.")
    if step.measured is not None or step.predicted is not None:
        pictures.append(timeline_picture(step, workload, title))
    else:
        left_out.append(f"The timeline of the step {step.name}: it has neither measured.json nor predicted.json.")
    return pictures


def write_figures(run: Run | str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write each picture as PNG and SVG into `folder`, which is created if missing. Raises before it writes anything if
    matplotlib is missing."""
    require_matplotlib()
    found = figures_of(run if isinstance(run, Run) else read_run(run))
    return [path for picture in found.all for path in picture.save(folder)]
