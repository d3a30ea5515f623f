"""Computes the cost of rechecks: an upper bound for every plan, over the networks of the plan matrix, in virtual time.

    python -m benchmarks.plans.recheck_cost --hardware h100,titan-x

In a checked step, everything that a plan discards is hashed twice, before the discard and after the recompute. That
takes two passes at the card's memory bandwidth, and 16 bytes for each storage. The bound assumes a plan that discards
everything that can be recomputed or encoded, and a step as fast as with everything kept, and divides by the number of
steps between two checks. For a plan that discards less, or takes longer, the share is smaller.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.plans.plan_matrix import NETWORKS
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile
from vdnn.runtime.recompute.rechecks import BYTES_A_STORAGE, DEFAULT_ONE_IN
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of

_PASSES = 2
HARDWARE = ("titan-x", "v100-32", "h100", "h200")


def cost_of(name: str, hardware: str, one_in: int) -> tuple[float, int]:
    """The share of the step's time, and the bytes of the hashes in a checked step."""
    make, batch = NETWORKS[name]
    profile = load_profile(hardware)
    recording = rehearse(subject_of(make, batch), profile).recording
    discarded = [one.nbytes for one in recording.lifetimes if one.recompute is not None]
    checking_ns = _PASSES * sum(discarded) / (profile.memory_bytes_per_s * profile.bandwidth_efficiency) * 1e9
    step_ns = sum(point.compute_ns for point in recording.points)
    return checking_ns / step_ns / one_in, BYTES_A_STORAGE * len(discarded)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.recheck_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--networks", default=",".join(NETWORKS), metavar="A,B")
    parser.add_argument("--hardware", default=",".join(HARDWARE), metavar="A,B")
    parser.add_argument("--one-in", type=int, default=DEFAULT_ONE_IN, help="steps between two checks")
    chosen = parser.parse_args(arguments)
    cells = [(name, card) for name in chosen.networks.split(",") for card in chosen.hardware.split(",")]
    rows, shares = [], []
    progress = Progress("recheck cost", len(cells))
    for name, card in cells:
        progress.begin(f"{name} on {card}")
        share, nbytes = cost_of(name, card, chosen.one_in)
        shares.append(share)
        rows.append([name, card, f"{share:.3%}", f"{nbytes:,}"])
    progress.end()
    header = ["network", "card", "of the step's time, at most", "bytes in a checked step"]
    title = f"What rechecks cost, one step checked in {chosen.one_in}"
    print(render_table(title, header, rows, [f"Worst {max(shares):.3%} of a step's time."]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
