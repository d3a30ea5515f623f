"""Runs a sweep: every workload under every peer and budget, one cell at a time. Each result is added to the run.

    python -m benchmarks.sweep --quick                       a few minutes' grid that needs no GPU
    python -m benchmarks.sweep --place cuda --workloads resnet50,gpt2 --peers all --budgets 90%,60% --out RUN
    python -m benchmarks.sweep --out RUN ...                  the same command continues a stopped sweep
    python -m benchmarks.tables RUN; python -m benchmarks.figures RUN

A budget is a share of plain's peak at the same place, a size such as 12GiB, `min` (the least that any plan reaches), or
`peers`: one cell for each other peer, with that peer's peak as the budget.
`--place virtual` computes times and memory at full size without a GPU; `sim` runs tiny workloads for real and compares
gradients; `cuda` measures. docs/benchmarks.md explains each figure.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.grid import AS_PEERS, Grid, quick_grids
from benchmarks.harness.largest_batch import LARGEST_FILE, search_all
from benchmarks.harness.places import PLACES, require_gpu
from benchmarks.harness.sweep_run import Limits, OutOfTime, SweepRun
from benchmarks.harness.synthetic_data import DataOptions
from benchmarks.harness.workloads import WORKLOADS, workload_named
from benchmarks.peers import GROUPS, PEERS, peers_named
from benchmarks.tables import render_run
from vdnn.bytesize import parse_bytes
from vdnn.errors import VdnnError
from vdnn.hardware import load_profile
from vdnn.report.run_folder import CELLS_FILE, read_cells
from vdnn.step.json_lines import read_json_lines

WORKLOADS_BY_DEFAULT = ("vgg16", "resnet50", "gpt2")
PEERS_BY_DEFAULT = ("plain", "checkpoint", "checkpoint-selective", "save-on-cpu-pinned", "vdnn-2016", "vdnn-auto")
BUDGETS_BY_DEFAULT = ("90%", "75%", "60%", "min", "peers")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="the small grid without a GPU; ignores other options")
    made.add_argument("--workloads", default=",".join(WORKLOADS_BY_DEFAULT), metavar="NAMES", help="or all")
    known = f"among {', '.join(PEERS)}, or the groups {', '.join(GROUPS)}"
    made.add_argument("--peers", default=",".join(PEERS_BY_DEFAULT), metavar="NAMES", help=known)
    made.add_argument("--budgets", default=",".join(BUDGETS_BY_DEFAULT), metavar="LIST", help="for peers that have one")
    made.add_argument("--batch", type=int, metavar="N", help="instead of each workload's own")
    made.add_argument("--place", choices=PLACES, default="virtual")
    made.add_argument("--hardware", default="h100", metavar="NAME", help="the card of virtual times, default h100")
    made.add_argument("--out", type=Path, default=Path("build/sweep"), metavar="RUN", help="default build/sweep")
    made.add_argument("--steps", type=int, default=5, metavar="N", help="timed steps on a GPU, default 5")
    made.add_argument("--limit-s", type=float, default=float("inf"), metavar="S", help="of the whole sweep")
    made.add_argument("--cell-limit-s", type=float, default=900.0, metavar="S", help="of one cell, default 900")
    made.add_argument("--jobs", type=int, metavar="N", help="cells at once; default one on a GPU, else one a processor")
    made.add_argument("--deterministic", action="store_true", help="all steps under torch's deterministic algorithms")
    made.add_argument("--again", default="", metavar="STATUSES", help="run cells again that are failed,timed-out")
    made.add_argument("--loader-workers", type=int, metavar="N", help="load batches by a DataLoader with N workers")
    made.add_argument("--pin-memory", action="store_true", help="pin the memory of the DataLoader's batches")
    made.add_argument("--largest-batch", action="store_true", help="search the largest batch of each peer instead")
    return made


def grids_of(options: argparse.Namespace) -> list[Grid]:
    """The grids of the options. Raises ValueError, which names the valid values, for a wrong option."""
    if options.quick:
        return quick_grids()
    names = list(WORKLOADS) if options.workloads == "all" else options.workloads.split(",")
    for name in names:
        workload_named(name)
    budgets = options.budgets.split(",")
    for budget in budgets:
        _require_budget(budget)
    if options.place == "cuda":
        require_gpu()
    else:
        load_profile(options.hardware)
    hardware = "" if options.place == "cuda" else options.hardware
    data = DataOptions(options.loader_workers, options.pin_memory)
    if data.workers is not None and options.place == "virtual":
        raise ValueError("--loader-workers: place 'virtual' has no data to load; use sim or cuda.")
    peers = peers_named(options.peers.split(","))
    batch, steps, is_deterministic = options.batch, options.steps, options.deterministic
    return [Grid(options.place, hardware, names, peers, budgets, batch, steps, data, is_deterministic)]


def _require_budget(text: str) -> None:
    if text in ("min", AS_PEERS):
        return
    if text.endswith("%"):
        try:
            if 0 < float(text[:-1]) <= 100:
                return
        except ValueError:
            pass
        raise ValueError(f"--budgets: expected a share such as 60%, up to 100%, got {text!r}.")
    parse_bytes(text)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        grids = grids_of(options)
        read_cells(options.out / CELLS_FILE)
        read_json_lines(options.out / LARGEST_FILE)
    except (ValueError, RuntimeError, VdnnError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the cells that are running
    limits = Limits(time.monotonic() + options.limit_s, options.cell_limit_s, options.jobs)
    run = SweepRun(options.out, limits, again=frozenset(options.again.split(",")) - {""})
    try:
        if options.largest_batch:
            search_all(run, grids)
        else:
            run.do(grids)
    except KeyboardInterrupt:
        print(f"\nsweep: stopped. {_how_to_continue(options.out)}", file=sys.stderr)
        return 130
    except OutOfTime as error:
        print(f"sweep: {error} {_how_to_continue(options.out)}", file=sys.stderr)
    print(render_run(options.out))
    return 0


def _how_to_continue(out: Path) -> str:
    return f"The finished cells are in {out}; run the same command again to continue."


if __name__ == "__main__":
    sys.exit(main())
