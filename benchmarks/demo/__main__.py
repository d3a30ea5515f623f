"""`make demo` trains a small GPT under a byte budget and the same loop without vdnn, and plans VGG-16 for a card.

With a GPU it trains there. Without one it trains on a virtual machine: real tensors on the CPU, with the memory and the
time of a card. It prints both runs side by side, and writes a page and a picture. Exit code 0 means that losses,
parameters and gradients were equal bit for bit, and that the budget held.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import vdnn
from benchmarks.demo.devices import HARDWARE, CudaDevice, DemoDevice, VirtualDevice
from benchmarks.demo.results import PAGE, PICTURE, RUN, write_results, written_whole
from benchmarks.demo.training import CPU_SIZE, GPU_SIZE, Size, train_side_by_side
from benchmarks.demo.wording import training_text, verdict
from benchmarks.models import vgg16
from benchmarks.progress import Progress
from vdnn.errors import LibraryMissingError, VdnnError
from vdnn.report.drawing import require_matplotlib

FOLDER = Path("build") / "demo"
PLANNED_BATCH, PLANNED_BUDGET = 256, "12GiB"
INTERRUPTED = 130
LEFT = {
    PAGE: "the report: open it in a browser, no network needed",
    PICTURE: "memory over one step of both models, before and after",
    RUN: "the numbers, which `vdnn report` prints as text",
}


def show(folder: Path, make_device: Callable[[], DemoDevice], size: Size, planned_batch: int = PLANNED_BATCH) -> int:
    """Trains, plans, prints and writes. Returns the exit code."""
    began_s = time.monotonic()
    progress = Progress("demo", 2 * size.steps + 2)
    try:
        with written_whole(folder) as unfinished:
            trained = train_side_by_side(make_device, size, progress.begin)
            progress.begin(f"planning VGG-16 at batch {planned_batch} for {PLANNED_BUDGET}")
            planned = vdnn.plan(vgg16, planned_batch, hardware=HARDWARE, budget=PLANNED_BUDGET)
            progress.begin("writing the report")
            write_results(unfinished, trained, planned, PLANNED_BUDGET)
    finally:
        progress.end()
    print(training_text(trained))
    print(f"\n2. A plan for a card that this machine need not have\n\n{planned}\n")
    print(verdict(trained))
    print(f"\nFinished in {time.monotonic() - began_s:.0f} s. What to open:")
    for name, text in LEFT.items():
        path = str(folder / name)
        print(f"  {path:{len(str(folder)) + 14}}{text}")
    return 0 if trained.is_right else 1


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Trains a small GPT under a budget beside the same loop without vdnn, and plans VGG-16 for 12 GiB."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=description)
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="FOLDER", help=f"default {FOLDER}")
    parser.add_argument("--no-gpu", action="store_true", help="train on the virtual machine although there is a GPU")
    options = parser.parse_args(arguments)
    try:
        require_matplotlib()
    except LibraryMissingError as missing:
        print(f"demo: {missing}", file=sys.stderr)
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting
    has_gpu = torch.cuda.is_available() and not options.no_gpu
    try:
        return show(options.folder, CudaDevice if has_gpu else VirtualDevice, GPU_SIZE if has_gpu else CPU_SIZE)
    except KeyboardInterrupt:
        print(f"demo: interrupted; {options.folder} is as it was before.", file=sys.stderr)
        return INTERRUPTED
    except VdnnError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
