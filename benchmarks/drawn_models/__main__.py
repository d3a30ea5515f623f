"""Draws models of public libraries at their default sizes, plans each, runs each as planned, and prints a table.

python -m benchmarks.drawn_models FILE            plans what FILE has no row of yet, and prints its table
python -m benchmarks.drawn_models FILE --table    the table alone
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawn_models import of_diffusers, of_peft, of_timm, of_transformers
from benchmarks.drawn_models.planned_model import NO_ANSWER, NOT_IN_TORCH, PLANNED, Row, planned_row
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes

SEED = 44
BATCH = 2
COUNTS = {"transformers": 100, "timm": 20, "diffusers": 10, "peft": 10}
_DRAWS = {
    "transformers": of_transformers.drawn,
    "timm": of_timm.drawn,
    "diffusers": of_diffusers.drawn,
    "peft": of_peft.drawn,
}


def drawn(counts: dict[str, int], seed: int) -> dict[str, Callable[[int], Any]]:
    """The models of all libraries, in turns, so that a run that is stopped has some of each."""
    of_library = [list(_DRAWS[name](count, seed).items()) for name, count in counts.items()]
    places = []
    for library, models in enumerate(of_library):
        places += [(place / len(models), library, place) for place in range(len(models))]
    return dict(of_library[library][place] for _, library, place in sorted(places))


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs_as_predicted(row: Row) -> bool:
    """The step takes the predicted time, and at most the predicted memory: docs/planning.md says when less."""
    return bool(row["run_ns"] == row["predicted_ns"] and row["run_bytes"] <= row["predicted_bytes"])


def table(rows: Sequence[Row]) -> str:
    planned = [row for row in rows if row["outcome"] == PLANNED]
    in_torch = [row for row in rows if row["outcome"] != NOT_IN_TORCH]
    exact = [row for row in planned if runs_as_predicted(row)]
    header = ("model", "parameters", "saves", "kept", "budget", "peak", "slower", "run")
    cells = [
        (
            row["name"],
            format_bytes(row["parameter_bytes"]),
            str(row["saves"]),
            format_bytes(row["kept_bytes"]),
            format_bytes(row["budget_bytes"]),
            format_bytes(row["run_bytes"]),
            f"{row['run_ns'] / row['kept_ns'] - 1:.2%}",
            "as predicted" if runs_as_predicted(row) else "differs",
        )
        for row in planned
    ]
    others = [f"{row['name']}: {row['outcome']}: {row['error']}" for row in rows if row["outcome"] != PLANNED]
    remarks = [
        f"{len(planned)} of {len(in_torch)} planned, {len(planned) / max(len(in_torch), 1):.1%}; of these {len(exact)} "
        f"ran as predicted. In {sum(row['least_bytes'] < row['kept_bytes'] for row in planned)} of them saves make the "
        "peak; the others need the same memory under every plan.",
        *[
            f"{sum(row['name'].startswith(name) for row in planned)} of "
            f"{sum(row['name'].startswith(name) for row in in_torch)} of {name}."
            for name in COUNTS
        ],
        *others,
    ]
    return render_table(f"Drawn models, seed {SEED}, batch {BATCH}, without data on an H100", header, cells, remarks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drawn_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="JSON lines, one for each model")
    parser.add_argument("--table", action="store_true", help="plan nothing")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of processor time for a model")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no model after so many")
    parser.add_argument("--again", action="store_true", help="plan the models again that were not planned")
    given = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = [row for row in rows_of(given.file) if row["outcome"] == PLANNED or not given.again]
    if not given.table:
        models = drawn(COUNTS, SEED)
        known = {row["name"] for row in rows}
        if given.again:
            given.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        progress, until_s = Progress("drawn models", len(models)), time.monotonic() + 60 * given.minutes
        for name, make in models.items():
            progress.begin(name)
            if name in known or time.monotonic() > until_s:
                continue
            rows.append(planned_row(name, make, BATCH, given.limit))
            with given.file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
        progress.end()
    sys.stdout.write(table(rows) + "\n")
    return int(any(row["outcome"] == NO_ANSWER for row in rows))


if __name__ == "__main__":
    sys.exit(main())
