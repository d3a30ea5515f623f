"""Measures how long `auto` plans long steps, and how that grows: chains of 250 to 10,000 storages.

    python -m benchmarks.plans.plan_growth

The budget is halfway between the least and everything kept, so that about half of the storages have to be offloaded.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey

COUNTS = (250, 500, 1000, 2000, 5000, 10_000)
_MIB = 1 << 20


def long_chain(count: int, seed: int = 0, *, has_recomputes: bool = False) -> Recording:
    """A chain of storages, saved in order and used in reverse. The seed draws sizes (1 to 64 MiB) and compute times
    (0.01 to 0.8 ms). With recomputes, every other storage can be recomputed from the previous one in 0.01 to 0.1 ms."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 64) * _MIB for _ in range(count)]
    points, live = [], 0
    for index, size in enumerate(sizes):
        live += size
        key = SaveKey("Any", f"layer{index}", "float32", (size // 4,), (1,), 0)
        points.append(Point(PointKind.SAVE, index, key, draw.randint(10_000, 400_000), live, live))
    for index in reversed(range(count)):
        peak = live
        live = sum(sizes[: index + 1]) if index == count - 1 else live - sizes[index + 1]
        points.append(Point(PointKind.USE, index, None, draw.randint(20_000, 800_000), live, peak, "AnyBackward"))
    points.append(Point(PointKind.END, None, None, 0, 0, live))
    end = 2 * count
    recomputes = [
        Recompute("layer", (index - 1,), index, draw.randint(10_000, 100_000), size)
        if has_recomputes and index % 2
        else None
        for index, size in enumerate(sizes)
    ]
    lifetimes = tuple(
        Lifetime(size, (index,), (end - 1 - index,), (end - index,), index, index, end - index, recompute)
        for index, (size, recompute) in enumerate(zip(sizes, recomputes, strict=True))
    )
    return Recording("cpu", "by hand", 1 << 50, "none", "virtual", 0, 0, tuple(points), lifetimes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.plan_growth", description=__doc__.split("\n")[0])
    parser.add_argument("counts", nargs="*", type=int, default=list(COUNTS), help="storages in a step")
    parser.add_argument("--policy", default="auto", metavar="NAME")
    parser.add_argument("--recomputes", action="store_true", help="every other storage can be recomputed")
    options = parser.parse_args(arguments)
    counts, policy = options.counts, options.policy
    costs = profile_costs(load_profile("h100"))
    progress = Progress("plan_growth", len(counts))
    rows: list[tuple[str, ...]] = []
    before: tuple[int, float] | None = None
    for count in counts:
        progress.begin(f"{count} storages")
        recording = long_chain(count, has_recomputes=options.recomputes)
        budget_bytes = (least_bytes(recording) + recording.peak_bytes) // 2
        began_s = time.process_time()
        planned = plan_step(recording, costs, budget_bytes, policy)
        busy = time.process_time() - began_s
        seconds = planned.plan_seconds
        growth = "" if before is None else f"{seconds / before[1] / (count / before[0]):.2f} x"
        before = count, seconds
        rows.append(
            (str(count), str(len(recording.points)), f"{seconds:.2f}", f"{busy:.2f}", growth, f"{planned.slowdown:.3f}")
        )
    progress.end()
    header = ("storages", "points", "seconds", "of the processor", "a storage, against the line above", "slowdown")
    print(render_table(f"How long {policy} plans", header, rows, ["Aims: 2,000 storages in 2 s, 10,000 in 20 s."]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
