"""The README's picture: a fine-tune of Qwen3-8B's shape, 8,192 tokens, in the ways of axolotl#3776 and by vdnn.

    python -m benchmarks.peers.published.fine_tune benchmarks/results/fine_tune.jsonl [--picture FILE]

The step is that of axolotl's table: all parameters get gradients, without the optimizer's step. It runs without data on
the virtual card of benchmarks.peers, once in each way, and by vdnn under several budgets. Each result is a cell, one
line of the file; cells that the file has do not run again. The README's rows are printed, with the figures of
benchmarks.peers from peers.jsonl in the same folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.published.reproduced import Figures
from benchmarks.peers.published.rows import ROWS
from benchmarks.peers.published.virtual_step import recorded, virtual_step
from benchmarks.progress import Progress
from vdnn.planning.least_memory import least_bytes
from vdnn.report.cell import Cell, cell_as_json, cell_from_json
from vdnn.report.trade_off import draw_trade_off

TRAINING, CARD = ROWS[0].training, ROWS[0].card
WORKLOAD = "Qwen3-8B, 8,192 tokens"
PEERS = {
    "plain": "plain",
    "checkpoint": "checkpoint",
    "inputs away (axolotl, DeepSpeed)": "checkpoint, inputs away",
    "all saves away (TRL, torchtune)": "saves away",
}
BUDGETS = ("90%", "75%", "60%", "50%", "=checkpoint", "min")


def read_cells(path: Path) -> list[Cell]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [cell_from_json(json.loads(line), f"{path}:{number}") for number, line in enumerate(lines, 1)]


def run_missing(path: Path) -> list[Cell]:
    """All cells, in the order of PEERS and BUDGETS. Those that are new are written to the file."""
    cells = {(cell.peer, cell.budget): cell for cell in read_cells(path)}
    progress = Progress("fine_tune", len(PEERS) + 1 + len(BUDGETS))
    for peer, way in PEERS.items():
        progress.begin(peer)
        if (peer, None) not in cells:
            found = virtual_step(TRAINING, CARD, way)
            cells[peer, None] = _cell(peer, None, found.peak_bytes, found.step_ns)
            _write(path, cells.values())
    peaks = {peer: cell.peak_bytes or 0 for (peer, budget), cell in cells.items() if budget is None}
    missing = [budget for budget in BUDGETS if ("vdnn", budget) not in cells]
    if missing:
        progress.begin("vdnn's recording")
        step = recorded(TRAINING, CARD)
        least = least_bytes(step.recording)
    for budget in missing:
        progress.begin(f"vdnn, {budget}")
        budget_bytes = _bytes_of(budget, peaks, least)
        cells["vdnn", budget] = _cell("vdnn", budget, budget_bytes, step.planned_ns(CARD, budget_bytes))
        _write(path, cells.values())
    progress.end()
    return list(cells.values())


def _bytes_of(budget: str, peaks: dict[str, int], least: int) -> int:
    if budget == "min":
        return least
    if budget.startswith("="):
        return peaks[budget[1:]]
    return int(peaks["plain"] * float(budget.removesuffix("%")) / 100)


def _cell(peer: str, budget: str | None, peak_bytes: int, step_ns: int | None) -> Cell:
    return Cell(
        WORKLOAD,
        peer,
        budget=budget,
        budget_bytes=None if budget is None else peak_bytes,
        place="virtual",
        hardware=CARD,
        device=CARD,
        clock="virtual",
        step_ns=step_ns,
        peak_bytes=peak_bytes,
    )


def _write(path: Path, cells: Iterable[Cell]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(cell_as_json(cell)) + "\n" for cell in cells), encoding="utf-8")


def readme_rows(cells: Sequence[Cell], figures: Figures) -> list[str]:
    """The rows of the README's table: what axolotl measured, and what is computed, over checkpointing and plain."""
    by_name = {cell.budget or cell.peer: cell for cell in cells}
    plain, checkpoint = by_name["plain"], by_name["checkpoint"]
    before_bytes = next(step.before_bytes for step in [figures.step_of(ROWS[0])] if step is not None)
    measured = {row.way: row for row in ROWS if row.training == TRAINING and row.card == CARD}
    rows = []
    for name in (*PEERS, "=checkpoint"):
        cell, row = by_name[name], measured.get(PEERS.get(name, ""))
        published = "not measured"
        if row is not None and row.step_ms and row.memory_bytes and ROWS[0].step_ms:
            published = f"{row.step_ms / ROWS[0].step_ms:.2f} x, {row.memory_bytes / 1e9:.1f} GB"
        step_ns, growth = cell.step_ns or 0, (cell.peak_bytes or 0) - before_bytes
        shown = "**vdnn at checkpoint's peak**" if name == "=checkpoint" else name
        rows.append(
            f"| {shown} | {published} | {step_ns / (checkpoint.step_ns or 1):.2f} x, {growth / 1e9:.1f} GB "
            f"| {step_ns / (plain.step_ns or 1):.2f} x |"
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.published.fine_tune")
    parser.add_argument("path", type=Path, help="the file of cells, which is continued")
    parser.add_argument("--picture", type=Path, help="draw the cells to this file; needs matplotlib")
    options = parser.parse_args(arguments)
    cells = run_missing(options.path)
    print("\n".join(readme_rows(cells, Figures(options.path.with_name("peers.jsonl")))))
    if options.picture is not None:
        draw_trade_off(cells, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
