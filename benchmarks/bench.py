"""`make bench`: five minutes that show what vdnn does on this machine: a table, a picture, and one sentence to repeat.

With a GPU: a measured comparison with torch's own ways of saving memory, in a run under build/bench. Without one: a
small VGG-16 trained for real on this CPU, whose gradients are plain PyTorch's bits, and vDNN's headline table in
virtual time on its card. Which of the two it was, every table says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import figures, sweep
from benchmarks.claims import claims_of
from benchmarks.vdnn_paper import reproduction, vgg16_steps
from vdnn.report import read_run
from vdnn.report.comparison import comparisons
from vdnn.report.headline import headline

FOLDER = Path("build") / "bench"
WORKLOADS = "resnet50,gpt2"
PEERS = "plain,checkpoint,save-on-cpu-pinned,vdnn-auto"
BUDGETS = "80%,60%,min,peers"
LIMIT_S = 240


def on_gpu(folder: Path) -> int:
    """Cells that are there from an earlier time are not measured again: delete the folder for that."""
    run = folder / "run"
    grid = ["--place", "cuda", "--workloads", WORKLOADS, "--peers", PEERS, "--budgets", BUDGETS]
    status = sweep.main([*grid, "--out", str(run), "--limit-s", str(LIMIT_S)])
    if status:
        return status
    print()
    print("\n".join(map(str, claims_of(run))))
    status = figures.main([str(run), str(folder / "figures")])
    print(f"\n{headline(comparisons(read_run(run)))}")
    return status


def without_gpu(folder: Path) -> int:
    status = vgg16_steps.main(["--picture", str(folder / "vgg16_steps.png")])
    print()
    return status or reproduction.main(["--json", str(folder / "reproduction.jsonl")])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="FOLDER", help=f"default {FOLDER}")
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    return on_gpu(folder) if torch.cuda.is_available() else without_gpu(folder)


if __name__ == "__main__":
    sys.exit(main())
