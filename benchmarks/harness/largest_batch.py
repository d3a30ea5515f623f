"""Searches for the largest batch that trains under each peer, by bisection. Each probe is a cell in its own process.

A batch fits if the status of its cell is ok. vdnn gets no budget, and so has the memory of the device. First the batch
is doubled from the workload's own until one does not fit, or halved until one does; then the middle is tried until the
two are neighbours. Results go to RUN/largest.jsonl, with every batch that was tried:
`python -m benchmarks.sweep --largest-batch ...`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.harness.cell_spec import CellSpec
from benchmarks.harness.grid import Grid
from benchmarks.harness.sweep_run import SweepRun
from benchmarks.progress import Progress
from vdnn.errors import VdnnError
from vdnn.report.cell import FAILED, OK, OUT_OF_MEMORY, Cell
from vdnn.runtime.rehearsal.largest_batch import CannotSearch, find_largest_batch
from vdnn.step.json_lines import append_json_lines, read_json_lines

LARGEST_FILE = "largest.jsonl"
# Parts of vdnn's messages.
_NO_PLAN = ("cannot be met", "has no plan under")


def fits(result: Cell) -> bool:
    """True if the cell ran. A budget that cannot be met, and a policy without a plan, count as a lack of memory. Raises
    VdnnError if the cell says nothing about memory."""
    if result.status == OK:
        return True
    if result.status == OUT_OF_MEMORY or (result.status == FAILED and any(one in result.said for one in _NO_PLAN)):
        return False
    raise VdnnError(f"{result.status}, {result.said}")


def search_all(run: SweepRun, grids: Sequence[Grid]) -> None:
    """Search for every workload and peer of the grids, except those that the file already has."""
    path = run.folder / LARGEST_FILE
    done = {(one["workload"], one["peer"], one["place"], one["hardware"]) for one in read_json_lines(path).values}
    for grid in grids:
        todo = [
            (name, peer)
            for name in grid.workloads
            for peer in grid.peers
            if (name, peer, grid.place, grid.hardware) not in done
        ]
        progress = Progress("largest_batch", len(todo))
        for name, peer in todo:
            progress.begin(f"{name}, {peer}")
            spec = CellSpec(name, peer, grid.place, grid.hardware, steps=1, data=grid.data)
            append_json_lines(path, [_searched(run, spec, grid.batch_of(name))])
        progress.end()


def _searched(run: SweepRun, spec: CellSpec, first: int) -> dict[str, object]:
    tried: dict[int, str] = {}
    devices: set[str] = set()

    def probe(batch: int) -> float:
        result = run.result(dataclasses.replace(spec, batch=batch))
        result.batch = batch
        tried[batch] = result.status
        devices.add(result.device)
        return math.inf if fits(result) else -math.inf

    found: dict[str, object] = {
        "format": 1,
        "workload": spec.workload,
        "peer": spec.peer,
        "place": spec.place,
        "hardware": spec.hardware,
        "largest_batch": None,
        "said": "",
    }
    try:
        found["largest_batch"] = find_largest_batch(probe, first=first)
    except CannotSearch as error:
        found["said"] = str(error)
    return {**found, "device": max(devices), "tried": {str(batch): status for batch, status in sorted(tried.items())}}
