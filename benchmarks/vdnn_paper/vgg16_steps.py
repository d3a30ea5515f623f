"""`make bench`: VGG-16 under each policy: the figures of a step on a Titan X, and a comparison of gradients.

The first table and the picture are computed from unmodified training steps without data, in virtual time on the card of
the vDNN paper, and are the same on every machine. For the second table a small VGG-16 trains for real on this CPU, and
its gradients are compared with plain PyTorch's. `--json PATH` writes the figures with units in their names,
`--picture PATH` writes the picture elsewhere, `--no-picture` needs no matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from benchmarks.vdnn_paper.identical_gradients import IdentityFigures, compare_all, render_identity
from benchmarks.vdnn_paper.policy_steps import BATCHES, HARDWARE, WAYS, MeasuredStep, PolicyFigures, measure_steps

PICTURE = Path("build") / "bench" / "vgg16_steps.png"


def render_steps(rows: Sequence[PolicyFigures]) -> str:
    header = (
        "batch, policy",
        "peak GiB",
        "fits",
        "step ms",
        "slowdown",
        "offload GiB",
        "reload GiB",
        "release ms",
        "reload ms",
    )
    cells = [
        (
            f"{row.batch}, {row.way.name}",
            f"{row.peak_bytes / 2**30:.2f}",
            "yes" if row.fits else "NO",
            f"{row.step_ns / 1e6:.1f}",
            f"{row.slowdown:.2f} x",
            f"{row.to_host_bytes / 2**30:.2f}",
            f"{row.to_device_bytes / 2**30:.2f}",
            f"{row.release_stall_ns / 1e6:.1f}",
            f"{row.reload_stall_ns / 1e6:.1f}",
        )
        for row in rows
    ]
    remark = (
        "Computed in virtual time on the profile titan-x, float32: the step that each way settles into. A step that "
        "does not fit is timed as if it did. Offload, reload GiB: bytes copied to the host and to the device. Release, "
        "reload ms: stalls for an offload before the release of its memory, and for a reload before the use. "
        "A budget keeps what fits, and its recomputes count as compute; the policy it starts from offloads everything."
    )
    return render_table("5. A training step of VGG-16 on a Titan X of 12 GiB", header, cells, [remark])


def write_json(path: Path, steps: Sequence[MeasuredStep], identity: Sequence[IdentityFigures]) -> None:
    content = {
        "format": 1,
        "hardware": HARDWARE,
        "clock": steps[0].timeline.clock,
        "steps": [asdict(step.figures) for step in steps],
        "identity": [asdict(row) for row in identity],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vdnn_paper.vgg16_steps", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--picture", type=Path, metavar="PATH", default=PICTURE, help=f"default {PICTURE}")
    parser.add_argument("--no-picture", action="store_true", help="draw nothing")
    options = parser.parse_args(arguments)
    progress = Progress("vgg16_steps", len(BATCHES) * len(WAYS) + len(WAYS) + 2)
    steps = measure_steps(BATCHES, progress)
    identity = compare_all(progress)
    if not options.no_picture:
        progress.begin("the picture")
        # Imported here, so that the tables do not need matplotlib.
        from benchmarks.vdnn_paper.vgg16_picture import draw

        draw(steps, options.picture)
    progress.end()
    print(render_steps([step.figures for step in steps]))
    print()
    print(render_identity(identity))
    if not options.no_picture:
        print(f"\nThe picture of table 5 is in {options.picture}")
    if options.json is not None:
        write_json(options.json, steps, identity)
    return 0 if all(row.identical for row in identity) else 1


if __name__ == "__main__":
    sys.exit(main())
