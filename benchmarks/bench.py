"""`make bench`: shows in five minutes what vdnn does on this machine, with a table, a picture and a summary sentence.

With a GPU, it measures vdnn and torch's own ways of saving memory, in a run under build/bench. Without a GPU, it trains
a small VGG-16 for real on this CPU and compares its gradients with plain PyTorch's bit for bit, and computes vDNN's
headline table in virtual time on its card. Each table says which of the two it is.
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
    """Measure on the GPU. Cells of an earlier run are not measured again; delete the folder to measure them again."""
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
