"""Reads and writes a run: the folder that a benchmark, a session or `vdnn plan --save` writes.

It has `cells.jsonl`, with one measured or predicted step per line, or `steps/NAME/` with the Recording, the Plan and
the Timelines of a step, or `trainings/NAME.json`, the plan of a whole training, or several of these. A last line that
was cut off is ignored, because the writer may have been stopped; any other error in the cells is refused with its line.
A step whose files cannot be read (an older vdnn wrote them) is ignored and named in `notes`, unless the run has nothing
else. If two cells have the same identity, the later one counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vdnn.errors import FormatError, InvalidArgumentError
from vdnn.planning.recomputing import recording_under
from vdnn.report.cell import Cell, cell_as_json, cell_from_json
from vdnn.report.training_report import TrainingReport
from vdnn.step.json_lines import append_json_lines, read_json_lines
from vdnn.step.saved_step import STEPS_FOLDER, SavedStep

CELLS_FILE = "cells.jsonl"
TRAININGS_FOLDER = "trainings"


@dataclass(frozen=True, slots=True)
class Run:
    """The contents of a run. `notes` has a sentence for each part that was ignored when reading."""

    folder: Path
    cells: tuple[Cell, ...]
    steps: tuple[SavedStep, ...]
    notes: tuple[str, ...] = ()
    trainings: tuple[TrainingReport, ...] = ()  # plans of whole trainings

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def cell_of(self, step: SavedStep) -> Cell | None:
        """The cell that names the step, or None."""
        return next((cell for cell in self.cells if cell.step == step.name), None)

    def workload_of(self, step: SavedStep) -> str:
        cell = self.cell_of(step)
        return step.name if cell is None else cell.workload

    def title_of(self, step: SavedStep) -> str:
        """A title for the step, from its cell if it has one, else the name of its folder."""
        cell = self.cell_of(step)
        if cell is None:
            return step.name
        batch = "" if cell.batch is None else f", batch {cell.batch}"
        return f"{cell.workload}{batch}, {cell.peer}{f', budget {cell.budget_text}' if cell.budget else ''}"


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run. Raises InvalidArgumentError if the folder is not a run, and FormatError if a file is broken."""
    path = Path(folder)
    cells_file, steps_folder = path / CELLS_FILE, path / STEPS_FOLDER
    trainings_folder = path / TRAININGS_FOLDER
    if not cells_file.is_file() and not steps_folder.is_dir() and not trainings_folder.is_dir():
        found = "a folder that has neither" if path.is_dir() else "a file" if path.exists() else "a path without a file"
        raise InvalidArgumentError(
            argument=f"the run {str(path)!r}",
            expected=f"a folder with {CELLS_FILE} or {STEPS_FOLDER}/, as a benchmark, session.save(folder) or "
            "`vdnn plan ... --save folder` writes it",
            got=found,
        )
    cells, notes = _latest_cells(cells_file)
    steps, refused = _read_steps(steps_folder)
    if refused and not cells and not steps:
        raise refused[0]
    trainings = tuple(TrainingReport.load(one) for one in sorted(trainings_folder.glob("*.json")))
    return Run(path, cells, steps, (*notes, *(f"A step is ignored: {one}" for one in refused)), trainings)


def append_cells(folder: str | os.PathLike[str], cells: Sequence[Cell]) -> None:
    """Append to the run's file of cells. Creates the folder and the file if missing."""
    append_json_lines(Path(folder) / CELLS_FILE, map(cell_as_json, cells))


def read_cells(path: str | os.PathLike[str]) -> list[Cell]:
    """Every cell of a file of cells, in its order. Raises FormatError, which names the line, if one is not a cell."""
    return [cell_from_json(fields, f"{path}, line {number}") for number, fields in read_json_lines(path).found]


def _latest_cells(path: Path) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    found: dict[tuple[object, ...], Cell] = {}
    for cell in read_cells(path):
        found.pop(cell.identity, None)
        found[cell.identity] = cell
    cut_off = read_json_lines(path).cut_off
    note = f"{CELLS_FILE}: line {cut_off}, the last, was cut off and is ignored."
    return tuple(found.values()), () if cut_off is None else (note,)


def _read_steps(folder: Path) -> tuple[tuple[SavedStep, ...], list[FormatError]]:
    """The steps that can be read, and an error for each other step."""
    steps, refused = [], []
    for one in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not one.is_dir():
            continue
        try:
            step = SavedStep.load(one)
            _require_one_step(step, one)
        except FormatError as error:
            refused.append(error)
            continue
        if not step.is_empty:
            steps.append(step)
    return tuple(steps), refused


def _require_one_step(step: SavedStep, folder: Path) -> None:
    """Refuse a folder with files of two different steps: its pictures would be wrong."""
    recording, plan = step.recording, step.plan
    if recording is None or plan is None:
        return
    planned = [lifetime.nbytes for lifetime in plan.lifetimes]
    recorded = [lifetime.nbytes for lifetime in recording.lifetimes]
    fits = planned[: len(recorded)] == recorded
    if fits:
        try:
            followed = recording_under(recording, plan.lifetimes)
            sizes = [lifetime.nbytes for lifetime in followed.lifetimes]
            fits = sizes == planned and len(followed.points) == len(plan.points)
        except InvalidArgumentError as error:
            if error.argument == "plan":
                raise FormatError(where=str(folder), problem=str(error)) from None
            fits = False  # the recording lacks lifetimes that its points name
    if not fits:
        raise FormatError(
            where=str(folder),
            problem=f"plan.json is for another step than recording.json: the plan has {len(planned)} storages and "
            f"{len(plan.points)} points, the recording has {len(recorded)} and {len(recording.points)}. "
            "Save the plan and the recording of the same step.",
        )
