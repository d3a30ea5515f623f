"""Plans whole trainings of eight decoders on four machines under five budgets, beside published policies.

    python -m benchmarks.whole_state [--part 1/2] [--table] [--headlines]

Everything is in virtual time; no GPU is needed. With --part I/N, one N-th of the models and machines run, so that
processes can share them. Each cell is a line of results/whole_state.jsonl as soon as it is known, and cells in
that file are not run again; --table only writes results/whole_state.txt from them. The file of cells is not committed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.progress import Progress
from benchmarks.whole_state.cells import SHARES, Cell, all_trainings, cell_names, cell_of, run_cells
from benchmarks.whole_state.headlines import headlines
from benchmarks.whole_state.table import table_of

RESULTS = Path(__file__).parent.parent / "results"


def read_cells(path: Path) -> list[Cell]:
    lines = path.read_text().splitlines() if path.exists() else []
    cells = {cell.name: cell for cell in map(cell_of, map(json.loads, lines))}
    return [cells[name] for name in cell_names() if name in cells]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_state", description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N equal parts")
    parser.add_argument("--table", action="store_true", help="only write the table of the cells that are known")
    parser.add_argument("--headlines", action="store_true", help="only run the headline trainings")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    options = parser.parse_args(arguments)
    jsonl = options.results / "whole_state.jsonl"
    if options.headlines:
        (options.results / "whole_state_headlines.txt").write_text(headlines() + "\n")
        return 0
    if options.table and not jsonl.exists():
        parser.error(f"--table: expected cells in {jsonl}, and there are none. Run without --table first.")
    if not options.table:
        _run(options.part, jsonl)
        if options.part != "1/1":
            return 0  # other parts may still write
    cells = read_cells(jsonl)
    jsonl.write_text("".join(json.dumps(cell.record()) + "\n" for cell in cells))
    table = table_of(cells)
    (options.results / "whole_state.txt").write_text(table + "\n")
    print(table)
    return 0


def _run(part: str, jsonl: Path) -> None:
    index, count = map(int, part.split("/"))
    known = {cell.name for cell in read_cells(jsonl)}
    trainings = [one for place, one in enumerate(all_trainings()) if place % count == index - 1]
    progress = Progress("whole_state", len(trainings))
    for model, machine in trainings:
        progress.begin(f"{model.name} on {machine.name}")
        if all(f"{model.name} on {machine.name} at {share:.0%}" in known for share in SHARES):
            continue
        for cell in run_cells(model, machine):
            with jsonl.open("a") as file:
                file.write(json.dumps(cell.record()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
