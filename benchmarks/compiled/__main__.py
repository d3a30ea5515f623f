"""Steps of compiled graphs in virtual time, and the bits of compiled steps.

    python -m benchmarks.compiled [--network resnet50 ...] [--card h100 ...]
    python -m benchmarks.compiled bits [--network resnet50 ...] [--backend inductor] [--programs DIRECTORY]

Rows go to benchmarks/results/compiled.jsonl as they are made, and the tables beside it as text. Rows that the file
already has are not made again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.compiled import bits, programs
from benchmarks.compiled.beside import HEADER, OFFLOADS_ALL, Row, rows_of
from benchmarks.compiled.joint import cuts_of
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile

RESULTS = Path(__file__).parents[1] / "results"
NETWORKS = ("alexnet", "overfeat", "vgg16", "unet", "unet3d", "resnet18", "vit_base", "gpt2", "bert_base", "resnet50")
CARDS = ("h100", "a100-80", "rtx-4090")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled")
    parser.add_argument("what", nargs="?", choices=("times", "bits"), default="times")
    parser.add_argument("--network", nargs="+")
    parser.add_argument("--card", nargs="+", default=CARDS)
    parser.add_argument("--backend", choices=tuple(bits.BACKENDS), default="aot_eager")
    parser.add_argument("--programs", type=Path, help="a directory with clones of the programs of programs.py")
    options = parser.parse_args()
    if options.what == "bits":
        known = bits.names() if options.programs is None else programs.found_in(options.programs)
        bits.write_bits(RESULTS / "compiled_bits.txt", options.network or known, options.backend, options.programs)
        return
    networks = options.network or NETWORKS
    path = RESULTS / "compiled.jsonl"
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    progress = Progress("compiled", len(networks) * len(options.card))
    with path.open("a") as file:
        for network in networks:
            missing = [card for card in options.card if not any((network, card) == (r.network, r.card) for r in rows)]
            if not missing:
                continue
            cuts = cuts_of(network)
            for card in missing:
                progress.begin(f"{network} on {card}")
                made = list(rows_of(network, cuts, load_profile(card)))  # so that no part of a card counts as done
                rows += made
                file.writelines(json.dumps(asdict(row)) + "\n" for row in made)
                file.flush()
            path.with_suffix(".txt").write_text(table_of(rows))
    print(table_of(rows))


def table_of(rows: list[Row]) -> str:
    """The rows as a table, and how often each side was faster."""
    slower = [row for row in rows if row.ours_ns > row.theirs_ns]
    remarks = [
        "Times are multiples of the step with torch's own cut and everything kept. The budget is the most that torch's "
        "way holds at a time of inputs, outputs and what is saved; 'bytes' is its share of what torch's cut holds. "
        f"'{OFFLOADS_ALL}' is torch's activation offloading with everything tagged, on the streams of vdnn.",
        "'eager' is the step without a compiler under `auto` and the same budget, counted in the same way; 'none' "
        "where no plan meets it.",
        f"vdnn is slower in {len(slower)} of {len(rows)} rows.",
    ]
    title = "Compiled steps in virtual time: torch's ways to save memory, and vdnn.compile_options at the same bytes"
    return render_table(title, HEADER, [row.cells for row in rows], remarks) + "\n"


if __name__ == "__main__":
    main()
