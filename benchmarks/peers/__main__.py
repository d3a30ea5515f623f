"""Published measurements of peers beside the same steps in virtual time, and vdnn's step at the same peak.

    python -m benchmarks.peers benchmarks/results/peers.jsonl --table benchmarks/results/peers.txt [--row TEXT]

Each training runs once in each way of its rows, on a virtual machine of its card, and vdnn records and plans it once.
Every result is a line of the file as soon as it is known, and what the file has does not run again. The table reads
only the file. Without --row, all rows run; a training of 8B takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.published.reproduced import Figures, run_missing
from benchmarks.peers.published.rows import ROWS
from benchmarks.peers.published.table import render


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="the file of results, which is continued")
    parser.add_argument("--row", action="append", default=[], help="only rows whose key has this text; may be repeated")
    parser.add_argument("--table", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    asked = [row for row in ROWS if not options.row or any(part in row.key for part in options.row)]
    if not asked:
        parser.error(f"--row: no row has {options.row}: a row is named as in {ROWS[0].key!r}.")
    figures = Figures(options.path)
    run_missing(asked, figures)
    table = render(figures)
    print(table)
    if options.table is not None:
        options.table.write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
