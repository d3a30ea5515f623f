"""CellSpec: what a cell is to run, a workload under a peer and a budget at a place. The result is a Cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.synthetic_data import DataOptions
from benchmarks.peers import PEERS
from vdnn.report import Cell

# Workload, batch, peer, compiled, budget, place and hardware. Of two cells with the same key the later one counts.
CellKey = tuple[str, int | None, str, bool, str | None, str | None, str]


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One cell to run.

    `peer` is a name in PEERS. `budget` is text such as "60%" (of plain's peak), "=checkpoint" (the peak of that peer),
    "12GiB" or "min". `budget_bytes` is its size; None if that is unknown before the run. With `batch` None the
    workload's own batch is used. `run` is the folder for the step's files. With `deterministic`, all steps of the cell
    run under torch's deterministic algorithms.
    """

    workload: str
    peer: str
    place: str
    hardware: str
    budget: str | None = None
    budget_bytes: int | None = None
    batch: int | None = None
    steps: int = 5
    run: str | None = None
    data: DataOptions = field(default_factory=DataOptions)
    deterministic: bool = False

    @property
    def key(self) -> CellKey:
        return key_of(cell_of(self))

    @property
    def as_low_as(self) -> str | None:
        """The peer whose peak is the budget, or None."""
        return self.budget[1:] if self.budget is not None and self.budget.startswith("=") else None

    @property
    def step_name(self) -> str:
        """The name of the step's folder, different for each cell of a run."""
        parts = (self.workload, f"b{self.batch}" if self.batch else "", self.peer, self.budget or "", self.place)
        where = "" if self.place == "cuda" else self.hardware
        name = "-".join(part for part in (*parts, where) if part)
        return name.replace("%", "pct").replace("=", "as-").replace(":", "_").replace("/", "_")

    def __str__(self) -> str:
        return f"{self.workload}, {self.peer}{f' at {self.budget}' if self.budget else ''}"


def key_of(cell: Cell) -> CellKey:
    return cell.workload, cell.batch, cell.peer, cell.compiled, cell.budget, cell.place, cell.hardware


def cell_of(spec: CellSpec, **fields: Any) -> Cell:
    """A cell with what `spec` requests, and with `fields`."""
    peer = PEERS[spec.peer]
    return Cell(
        spec.workload,
        peer.cell_name,
        batch=spec.batch,
        budget=spec.budget,
        budget_bytes=spec.budget_bytes,
        place=spec.place,
        hardware=spec.hardware,
        compiled=peer.compiled,
        **fields,
    )
