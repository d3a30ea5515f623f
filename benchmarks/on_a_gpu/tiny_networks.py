"""Part of gpu-proof: trains every network at its tiny size on the GPU, and compares gradients with plain's.

The cells are those of a sweep (docs/benchmarks.md), with all steps under deterministic algorithms, in this one process:
most take less time than a process needs to start. Sessions offload small storages too, with small windows, so that
copies wait for each other. A cell that raises is a result, and its traceback is in the output. Each cell is written as
it ends, and no cell begins behind the limit. Needs no pytest. `--place sim` uses virtual machines, to try the program.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.claims import is_refused
from benchmarks.harness.cell_spec import CellSpec, cell_of
from benchmarks.harness.measure import first_line, measure
from benchmarks.harness.places import CudaPlace, Place
from benchmarks.harness.sweep_run import is_identical
from benchmarks.harness.workloads import WORKLOADS
from vdnn.report.cell import FAILED, NOT_RUN, OK, Cell
from vdnn.report.run_folder import append_cells

# One of each kind comes first, because the limit may end the run.
FIRST = ("resnet50", "gpt2", "vgg16", "unet", "lstm", "densenet121", "llama_1b_4k", "mixtral", "vit_base")
# As shares of plain's requested peak.
WAYS = (("plain", None), ("vdnn-all", None), ("vdnn-auto", "80%"), ("vdnn-auto", "min"), ("vdnn-auto-offload", "min"))
STEPS = 3


class TinyCudaPlace(CudaPlace):
    """The GPU, for workloads of their tiny size."""

    is_tiny = True


def names() -> list[str]:
    with_tiny = [name for name, entry in WORKLOADS.items() if entry.tiny is not None]
    return [*FIRST, *(name for name in with_tiny if name not in FIRST)]


def cells_of(workload: str, place: str, hardware: str) -> Iterator[Cell]:
    plain: Cell | None = None
    for peer, budget in WAYS:
        budget_bytes = _bytes_of(budget, plain)
        spec = CellSpec(workload, peer, place, hardware, budget, budget_bytes, steps=STEPS, deterministic=True)
        found = _measured(spec, TinyCudaPlace() if place == "cuda" else None)
        if peer == "plain":
            plain = found
        elif plain is not None:
            found.identical = is_identical(plain, found)
        yield found


def _bytes_of(budget: str | None, plain: Cell | None) -> int | None:
    if budget is None or not budget.endswith("%") or plain is None or plain.requested_bytes is None:
        return None
    return int(float(budget[:-1]) / 100 * plain.requested_bytes)


def _measured(spec: CellSpec, place: Place | None) -> Cell:
    try:
        return measure(spec, place)
    except Exception as error:  # a network that fails must not hide the others
        traceback.print_exc()
        return cell_of(spec, status=FAILED, said=f"{type(error).__name__}: {first_line(error)}")
    finally:
        gc.collect()


def verdict_of(cell: Cell) -> str:
    """The reason why a cell is a failure, or an empty text."""
    if cell.status not in (OK, NOT_RUN) and not is_refused(cell):
        return f"{cell.status}: {cell.said}"
    return "gradients differ from plain's" if cell.identical is False else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.tiny_networks", description=__doc__)
    parser.add_argument("--place", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--workloads", default=",".join(names()), metavar="NAMES", help="separated by commas")
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--out", type=Path, metavar="RUN", help="also write the cells there")
    options = parser.parse_args(arguments)
    if options.place == "cuda" and not torch.cuda.is_available():
        print("tiny_networks: torch sees no GPU here: --place sim tries the program without one.", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    hardware = "" if options.place == "cuda" else "h100"
    failures = alike = unsure = tried = 0
    for workload in options.workloads.split(","):
        if time.monotonic() - began_s > options.limit_s:
            print(f"the time is over: {workload} and those behind it did not run")
            break
        for cell in cells_of(workload, options.place, hardware):
            reason = verdict_of(cell)
            failures += bool(reason)
            if cell.peer != "plain":
                tried += 1
                alike += cell.identical is True
                unsure += cell.status == OK and cell.identical is None
            title = f"{workload}, {cell.peer}{f' at {cell.budget}' if cell.budget else ''}"
            said = "ran" if cell.peer == "plain" else "as plain" if cell.identical else "cannot be compared"
            print(f"{title}: {reason or cell.said or said}", flush=True)
            if options.out is not None:
                append_cells(options.out, [cell])
    print(f"{alike} of {tried} have plain's gradients, {unsure} cannot be compared, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
