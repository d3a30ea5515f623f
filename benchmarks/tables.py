"""Prints the cells of a run as tables, one for each workload and place. It only reads the run.

python -m benchmarks.tables RUN
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cell_spec import key_of
from benchmarks.harness.largest_batch import LARGEST_FILE
from benchmarks.peers import PEERS, name_of_cell
from benchmarks.text_table import render_table
from vdnn.errors import FormatError
from vdnn.report.cell import OK, OUT_OF_MEMORY, Cell
from vdnn.report.run_folder import CELLS_FILE, read_cells
from vdnn.step.json_lines import read_json_lines

GIB, MIB = 2**30, 2**20
_HEADER = ("peer", "peak", "of plain", "step ms", "of plain", "stall ms", "out", "host", "gradients")
_ORDER = {name: index for index, name in enumerate(PEERS)}
_WHOSE_TIME = {
    "cuda": "Measured on the GPU.",
    "sim": "Real tensors of a tiny size; times are virtual, and not those of the full size.",
    "virtual": "Computed in virtual time, without data.",
}


def render_run(folder: Path) -> str:
    """All tables of the folder. Of two cells with the same key the later one counts."""
    cells = list({key_of(one): one for one in read_cells(folder / CELLS_FILE)}.values())
    largest = read_json_lines(folder / LARGEST_FILE).values
    tables = [_table(group) for group in _groups(cells)]
    if largest:
        tables.append(_largest_table(largest))
    return "\n\n".join(tables) or f"{folder} has no cells."


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.workload, cell.batch, cell.place, cell.hardware), []).append(cell)
    return list(found.values())


def _table(cells: Sequence[Cell]) -> str:
    first = cells[0]
    bases = {cell.compiled: cell for cell in cells if cell.is_plain and cell.peak_bytes and cell.step_ns}
    unit, name = (MIB, "MiB") if first.place == "sim" else (GIB, "GiB")
    cells = sorted(cells, key=_sort_key)
    rows = [_row(cell, bases.get(cell.compiled), unit) for cell in cells]
    remarks = [_WHOSE_TIME[first.place or "virtual"], f"Bytes in {name}."]
    remarks += [f"{_title_of(cell)}: {_said(cell)}." for cell in cells if cell.status != OK or cell.said]
    device = next((cell.device for cell in cells if cell.device), first.hardware)
    title = f"{first.workload}, batch {first.batch}: {first.place}, {device}"
    return render_table(title, _HEADER, rows, remarks)


def _sort_key(cell: Cell) -> tuple[int, float]:
    """Sorts by peer, then shares from the largest down, then sizes in their order, then `min`."""
    budget = cell.budget or ""
    share = -float(budget[:-1]) if budget.endswith("%") else 1.0 if budget == "min" else 0.0
    return _ORDER.get(name_of_cell(cell), len(_ORDER)), share


def _said(cell: Cell) -> str:
    said = cell.said.rstrip(".")
    return said if cell.status == OK else f"{cell.status}{', ' if said else ''}{said}"


def _title_of(cell: Cell) -> str:
    return f"{name_of_cell(cell)}{' at ' + cell.budget if cell.budget else ''}"


def _row(cell: Cell, plain: Cell | None, unit: int) -> tuple[str, ...]:
    step_ns, peak = cell.step_ns, cell.peak_bytes
    if step_ns is None or peak is None:
        return (_title_of(cell), cell.status, *["-"] * (len(_HEADER) - 2))
    does_not_fit = " *" if cell.status == OUT_OF_MEMORY else ""
    return (
        _title_of(cell),
        f"{peak / unit:.2f}{does_not_fit}",
        f"{peak / plain.peak_bytes:.0%}" if plain and plain.peak_bytes else "-",
        f"{step_ns / 1e6:.3f}" if step_ns < 1e7 else f"{step_ns / 1e6:.1f}",
        f"{step_ns / plain.step_ns:.3f} x" if plain and plain.step_ns else "-",
        "-" if cell.stall_ns is None else f"{cell.stall_ns / 1e6:.1f}",
        _bytes(cell.to_host_bytes, unit),
        _bytes(cell.host_bytes, unit),
        {None: "-", True: "identical", False: "DIFFER"}[cell.identical],
    )


def _bytes(found: int | None, unit: int) -> str:
    return "-" if found is None else f"{found / unit:.2f}"


def _largest_table(largest: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"{one['workload']}, {one['peer']}",
            f"{one['place']}, {one['device']}",
            "-" if one["largest_batch"] is None else str(one["largest_batch"]),
            str(len(one["tried"])),
        )
        for one in largest
    ]
    remarks = [f"{one['workload']}, {one['peer']}: {one['said'].rstrip('.')}." for one in largest if one["said"]]
    return render_table("Largest batches", ("workload, peer", "place", "batch", "tried"), rows, remarks)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or not Path(given[0]).is_dir():
        print("tables: expected one argument, the folder of a run (benchmarks.sweep --out RUN).", file=sys.stderr)
        return 2
    try:
        print(render_run(Path(given[0])))
    except FormatError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
