"""A run: the folder that a benchmark, a session or `vdnn plan --save` leaves, read into plain values.

It has `cells.jsonl`, one measured or predicted training step a line, or `steps/NAME/` with the Recording, the Plan and
the Timelines of a step, or both. A last line that was cut off is left out, because whoever writes may have been
stopped; anything else that is wrong with the cells is refused with its line. A step whose files cannot be read (an
older vdnn wrote them) is left out and named, unless it is all there is. Of two cells that say the same the later
counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vdnn.errors import InvalidArgumentError, VdnnError
from vdnn.planning.recomputing import recording_under
from vdnn.report.cell import Cell, cell_as_json, cell_from_json
from vdnn.step.json_form import FormatError
from vdnn.step.saved_step import STEPS_FOLDER, SavedStep

CELLS_FILE = "cells.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """`notes`: what was left out on reading, a sentence each."""

    folder: Path
    cells: tuple[Cell, ...]
    steps: tuple[SavedStep, ...]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def cell_of(self, step: SavedStep) -> Cell | None:
        """The cell that names the step."""
        return next((cell for cell in self.cells if cell.step == step.name), None)

    def workload_of(self, step: SavedStep) -> str:
        cell = self.cell_of(step)
        return step.name if cell is None else cell.workload

    def title_of(self, step: SavedStep) -> str:
        """By its cell, which says more than the name of a folder."""
        cell = self.cell_of(step)
        if cell is None:
            return step.name
        batch = "" if cell.batch is None else f", batch {cell.batch}"
        return f"{cell.workload}{batch}, {cell.peer}{f', budget {cell.budget}' if cell.budget else ''}"


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Raises FormatError or InvalidArgumentError, which say what was looked for."""
    place = Path(folder)
    cells_file, steps_folder = place / CELLS_FILE, place / STEPS_FOLDER
    if not cells_file.is_file() and not steps_folder.is_dir():
        found = "a folder that has neither" if place.is_dir() else "a file" if place.exists() else "nothing there"
        raise InvalidArgumentError(
            argument=f"the run {str(place)!r}",
            expected=f"a folder with {CELLS_FILE} or {STEPS_FOLDER}/, as a benchmark, session.save(folder) or "
            "`vdnn plan ... --save folder` makes it",
            got=found,
        )
    cells, notes = _read_cells(cells_file) if cells_file.is_file() else ((), ())
    steps, refused = _read_steps(steps_folder)
    if refused and not cells and not steps:
        raise FormatError(refused[0])
    return Run(place, cells, steps, (*notes, *(f"A step is left out: {one}" for one in refused)))


def append_cells(folder: str | os.PathLike[str], cells: Sequence[Cell]) -> None:
    """To the run's file of cells; both are made if they are not there."""
    path = Path(folder) / CELLS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.read_bytes() if path.exists() else b""
    if there and not there.endswith(b"\n"):  # cut off: what follows is not to become a part of it
        path.write_bytes(there[: there.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(cell_as_json(cell)) + "\n" for cell in cells)


def _read_cells(path: Path) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="strict").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: expected text in UTF-8, got bytes that are none at {error.start}.") from None
    found: dict[tuple[object, ...], Cell] = {}
    notes: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                notes.append(f"{CELLS_FILE}: line {number}, the last, was cut off and is left out.")
                break
            raise FormatError(f"{path}, line {number}: this is no JSON: {error}.") from None
        cell = cell_from_json(fields, f"{path}, line {number}")
        found.pop(cell.identity, None)
        found[cell.identity] = cell
    return tuple(found.values()), tuple(notes)


def _read_steps(folder: Path) -> tuple[tuple[SavedStep, ...], list[str]]:
    """And what is wrong with those that cannot be read."""
    steps, refused = [], []
    for one in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not one.is_dir():
            continue
        try:
            step = SavedStep.load(one)
            _require_one_step(step, one)
        except FormatError as error:
            refused.append(str(error))
            continue
        if not step.is_empty:
            steps.append(step)
    return tuple(steps), refused


def _require_one_step(step: SavedStep, folder: Path) -> None:
    """Files of two steps in one folder would make pictures that are wrong."""
    recording, plan = step.recording, step.plan
    if recording is None or plan is None:
        return
    planned = [lifetime.nbytes for lifetime in plan.lifetimes]
    recorded = [lifetime.nbytes for lifetime in recording.lifetimes]
    fits = planned[: len(recorded)] == recorded
    if fits:
        try:
            followed = recording_under(recording, plan.lifetimes)
        except VdnnError as error:
            raise FormatError(f"{folder}: {error}") from None
        sizes = [lifetime.nbytes for lifetime in followed.lifetimes]
        fits = sizes == planned and len(followed.points) == len(plan.points)
    if not fits:
        raise FormatError(
            f"{folder}: plan.json is for another step than recording.json: it has {len(planned)} storages and "
            f"{len(plan.points)} points, the recording {len(recorded)} and {len(recording.points)}. "
            "Save both of one step."
        )
