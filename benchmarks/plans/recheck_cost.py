"""Computes the cost of rechecks, an upper bound for every plan, over the networks of the plan matrix, in virtual time.

    python -m benchmarks.plans.recheck_cost --hardware h100,titan-x

In a checked step, everything that a plan discards is hashed twice, before the discard and after the recompute. That
takes two passes at the card's memory bandwidth, and 16 bytes for each storage. The bound assumes a plan that discards
everything that can be recomputed or encoded, and a step as fast as with everything kept, and divides by the number of
steps between two checks. For a plan that discards less, or takes longer, the share is smaller.

Under `parameters=`, all parameters are hashed in one call of the model of as many, before and after their use. The last
column is the share of these two passes if all of them are managed, in a step that no copy makes longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.plans.plan_matrix import NETWORKS
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile
from vdnn.runtime.recompute.rechecks import BYTES_A_STORAGE, DEFAULT_ONE_IN
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of

_PASSES = 2
HARDWARE = ("titan-x", "v100-32", "h100", "h200")


class RecheckCost(NamedTuple):
    """Shares of the step's time, and the bytes of the hashes in a checked step."""

    discarded: float
    nbytes: int
    parameters: float


def cost_of(name: str, hardware: str, one_in: int) -> RecheckCost:
    make, batch = NETWORKS[name]
    subject, profile = subject_of(make, batch), load_profile(hardware)
    recording = rehearse(subject, profile).recording
    discarded = [one.nbytes for one in recording.lifetimes if one.recompute is not None]
    with FakeTensorMode():
        parameters = sum(one.nbytes for one in subject.make().model.parameters())
    ns_a_byte = _PASSES / (profile.memory_bytes_per_s * profile.bandwidth_efficiency) * 1e9
    step_ns = one_in * sum(point.compute_ns for point in recording.points)
    return RecheckCost(
        ns_a_byte * sum(discarded) / step_ns, BYTES_A_STORAGE * len(discarded), ns_a_byte * parameters / step_ns
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.recheck_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--networks", default=",".join(NETWORKS), metavar="A,B")
    parser.add_argument("--hardware", default=",".join(HARDWARE), metavar="A,B")
    parser.add_argument("--one-in", type=int, default=DEFAULT_ONE_IN, help="steps between two checks")
    chosen = parser.parse_args(arguments)
    cells = [(name, card) for name in chosen.networks.split(",") for card in chosen.hardware.split(",")]
    rows, costs = [], []
    progress = Progress("recheck cost", len(cells))
    for name, card in cells:
        progress.begin(f"{name} on {card}")
        cost = cost_of(name, card, chosen.one_in)
        costs.append(cost)
        rows.append([name, card, f"{cost.discarded:.3%}", f"{cost.nbytes:,}", f"{cost.parameters:.3%}"])
    progress.end()
    header = ["network", "card", "of the step's time, at most", "bytes in a checked step", "parameters, at most"]
    title = f"What rechecks cost, one step checked in {chosen.one_in}"
    worst, parameters = max(one.discarded for one in costs), max(one.parameters for one in costs)
    notes = [f"Worst {worst:.3%} of a step's time; {parameters:.3%} for parameters."]
    print(render_table(title, header, rows, notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
