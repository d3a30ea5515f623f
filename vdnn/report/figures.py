"""The pictures of a run, and the reasons for those that cannot be drawn."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vdnn.report.comparison import cells_of_run, comparisons
from vdnn.report.drawing import Picture, require_matplotlib
from vdnn.report.memory_over_step import memory_picture
from vdnn.report.palette import looks_of
from vdnn.report.prediction import peaks_of, prediction_picture, times_of
from vdnn.report.run_folder import Run, read_run
from vdnn.report.step_timeline import timeline_picture
from vdnn.report.trade_off import trade_off_picture
from vdnn.report.training_pictures import training_pictures
from vdnn.step.saved_step import SavedStep


@dataclass(frozen=True, slots=True)
class Figures:
    """The pictures of a run. `left_out` has a sentence with the reason for each picture that cannot be drawn."""

    trade_offs: tuple[Picture, ...]
    prediction: Picture | None
    steps: dict[str, tuple[Picture, ...]]  # by the step's name
    left_out: tuple[str, ...]
    trainings: tuple[tuple[Picture, ...], ...] = ()

    @property
    def all(self) -> tuple[Picture, ...]:
        of_run = (*self.trade_offs, *(() if self.prediction is None else (self.prediction,)))
        grouped = (*self.steps.values(), *self.trainings)
        return (*of_run, *(picture for pictures in grouped for picture in pictures))


def figures_of(run: Run) -> Figures:
    """Choose the pictures of a run. This draws nothing."""
    cells, compared = cells_of_run(run), comparisons(run)
    looks = looks_of(cells)
    left_out = []
    trade_offs = []
    for comparison in compared:
        if comparison.measured:
            trade_offs.append(trade_off_picture(comparison, looks))
        else:
            left_out.append(f"Memory against time of {comparison.name}: none of its cells was measured.")
    if not compared and not run.trainings:
        left_out.append("Memory against time: the run has no cells.")
    prediction = prediction_picture(cells) if times_of(cells) or peaks_of(cells) else None
    if prediction is None and not run.trainings:
        left_out.append("Prediction against measurement: no cell was both predicted and measured.")
    steps = {}
    for step in run.steps:
        steps[step.name] = tuple(_pictures_of_step(run, step, left_out))
    if not run.steps and not run.trainings:
        left_out.append("Memory over a step, and its timeline: the run has no steps/.")
    trainings = tuple(training_pictures(one) for one in run.trainings)
    return Figures(tuple(trade_offs), prediction, steps, tuple(left_out), trainings)


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
