"""Runs the cells of grids, each in a process of its own, and adds each result to the run's folder.

A workload's plain cell runs first: budgets are shares of its peak, and gradients are compared with its. Cells that the
folder already has are not run again.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.cell_process import CellProcess, Measure
from benchmarks.harness.cell_spec import CellKey, CellSpec, cell_of, key_of
from benchmarks.harness.grid import Grid
from benchmarks.harness.measure import measure
from benchmarks.harness.provenance import commit_of_tree
from benchmarks.harness.virtual_warmth import warm_up
from benchmarks.peers import PEERS
from benchmarks.progress import Progress
from vdnn.bytesize import parse_bytes
from vdnn.report.cell import NOT_RUN, Cell
from vdnn.report.run_folder import CELLS_FILE, append_cells, read_cells

_LOOK_S = 0.02


class OutOfTime(Exception):
    """The sweep's time is over. Cells that were running are not recorded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a sweep. `until_s` is a time of time.monotonic(). `jobs` None means one on a GPU, else one per
    processor."""

    until_s: float
    cell_s: float
    jobs: int | None = None

    def jobs_at(self, place: str) -> int:
        return self.jobs or (1 if place == "cuda" else os.cpu_count() or 1)


class SweepRun:
    """The run in one folder. `measure` runs in the cells' processes."""

    def __init__(
        self, folder: Path, limits: Limits, *, again: frozenset[str] = frozenset(), measure: Measure = measure
    ) -> None:
        self.folder = folder
        self._limits = limits
        self._measure = measure
        self._done: dict[CellKey, Cell] = {}
        for cell in read_cells(folder / CELLS_FILE):
            if cell.status not in again:
                self._done[key_of(cell)] = cell
        self._is_warm = False
        self._next: CellProcess | None = None  # on a GPU: imports while the process before it measures

    def do(self, grids: Sequence[Grid]) -> None:
        """Run the cells of the grids. Raises OutOfTime; a failed cell is a result."""
        for grid in grids:
            todo = [spec for name in grid.workloads for spec in grid.specs(name, str(self.folder))]
            self._do(grid, [spec for spec in todo if spec.key not in self._done], len(todo))

    def _do(self, grid: Grid, todo: list[CellSpec], total: int) -> None:
        progress = Progress(f"sweep, {grid.place}", len(todo))
        running: list[CellProcess] = []
        try:
            while todo or running:
                ready = next((spec for spec in todo if self._is_ready(spec, todo, running)), None)
                if ready is not None and len(running) < self._limits.jobs_at(grid.place):
                    todo.remove(ready)
                    progress.begin(str(ready))
                    resolved = self._with_budget(ready)
                    if isinstance(resolved, Cell):
                        self._note(ready, resolved)
                    else:
                        running.append(self.begin(resolved))
                        if grid.place == "cuda" and todo:
                            self._next = self._process(forks=False)
                    continue
                self._require_time()
                for process in list(running):
                    result = process.wait(_LOOK_S)
                    if result is not None:
                        running.remove(process)
                        self._note(process.spec, result)
        finally:
            for process in (*running, *([] if self._next is None else [self._next])):
                process.kill()
            self._next = None
            progress.end()

    def begin(self, spec: CellSpec) -> CellProcess:
        forks = spec.place != "cuda"
        if forks and not self._is_warm:
            self._is_warm = True
            commit_of_tree()  # cached once for all forked processes
            warm_up()
        process, self._next = self._next or self._process(forks=forks), None
        return process.begin(spec)

    def _process(self, *, forks: bool) -> CellProcess:
        return CellProcess(self._measure, self.folder, limit_s=self._limits.cell_s, forks=forks)

    def result(self, spec: CellSpec) -> Cell:
        """The result of one cell, which runs alone and is not recorded."""
        process = self.begin(spec)
        try:
            while True:
                self._require_time()
                result = process.wait(_LOOK_S)
                if result is not None:
                    return result
        finally:
            process.kill()

    def _require_time(self) -> None:
        if time.monotonic() > self._limits.until_s:
            raise OutOfTime("the time limit is reached.")

    def _is_ready(self, spec: CellSpec, todo: Sequence[CellSpec], running: Sequence[CellProcess]) -> bool:
        """True unless the cell waits for the plain cells of its workload, or for the peer whose peak is its budget."""
        if _is_base(spec):
            return True
        waited = [one for one in (*todo, *(process.spec for process in running)) if one.workload == spec.workload]
        return not any(_is_base(one) or one.peer == spec.as_low_as for one in waited)

    def _base(self, spec: CellSpec) -> Cell | None:
        """The cell with which this one is compared, or None if it has not run."""
        peer = "compiled-plain" if PEERS[spec.peer].compiled else "plain"
        return self._done.get(dataclasses.replace(spec, peer=peer, budget=None).key)

    def _with_budget(self, spec: CellSpec) -> CellSpec | Cell:
        if spec.budget is None or spec.budget == "min":
            return spec
        if spec.as_low_as is not None:
            return self._as_low(spec, spec.as_low_as)
        if not spec.budget.endswith("%"):
            return dataclasses.replace(spec, budget_bytes=parse_bytes(spec.budget))
        plain = self._base(spec)
        # A session counts requested bytes, so its budget is a share of those.
        peak_bytes = None if plain is None else plain.requested_bytes or plain.peak_bytes
        if peak_bytes is None:
            said = f"its budget is {spec.budget} of plain's peak, which is unknown: {_why_unknown(plain)}"
            return cell_of(spec, status=NOT_RUN, said=said)
        share = float(spec.budget[:-1]) / 100
        return dataclasses.replace(spec, budget_bytes=int(share * peak_bytes))

    def _as_low(self, spec: CellSpec, peer: str) -> CellSpec | Cell:
        """The cell with the peak of `peer` as its budget, in requested bytes if they are known."""
        found = self._done.get(dataclasses.replace(spec, peer=peer, budget=None).key)
        if found is None or found.peak_bytes is None:
            said = f"its budget is the peak of {peer}, which is unknown: {_why_unknown(found)}"
            return cell_of(spec, status=NOT_RUN, said=said)
        return dataclasses.replace(spec, budget_bytes=found.requested_bytes or found.peak_bytes)

    def _note(self, spec: CellSpec, result: Cell) -> None:
        base = self._base(spec)
        if base is not None and not _is_base(spec):
            result.identical = is_identical(base, result)
        append_cells(self.folder, [result])
        self._done[spec.key] = result


def is_identical(plain: Cell, other: Cell) -> bool | None:
    """Compare the gradients of two cells. None if that proves nothing: gradients are missing, or differ although one
    of the cells does not repeat its own."""
    if plain.gradients is None or other.gradients is None:
        return None
    if plain.gradients == other.gradients:
        return True
    return False if plain.deterministic is not False and other.deterministic is not False else None


def _is_base(spec: CellSpec) -> bool:
    return spec.peer in ("plain", "compiled-plain")


def _why_unknown(plain: Cell | None) -> str:
    if plain is None:
        return "it has not run"
    return f"{plain.status}{', ' + plain.said if plain.said else ''}"
