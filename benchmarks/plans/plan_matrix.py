"""Plans every network, card and budget with every policy: predictions, steps that ran, and the fastest policy.

    python -m benchmarks.plans.plan_matrix build/plan_matrix.jsonl --networks resnet50,vit_large --hardware h100

A cell is a network on a card under a budget between the least that any plan reaches and the peak with everything kept.
For each policy that plans, a line of JSON goes to the file: predicted step and peak, whether it fits, and seconds of
planning. For `auto` the line also has the certified bound, and the regret with costs that are wrong by up to 20 %; with
`--run` it has the same step run in virtual time. Cells that the file already has are not run again, so the program can
be stopped and continued. The table (benchmarks/plans/plan_matrix_table.py) reads only the file.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import benchmarks.models as models
from benchmarks.models.mixed_precision import mixed
from benchmarks.models.workload import Workload
from benchmarks.plans.executed_steps import ExecutedSteps
from benchmarks.plans.plan_cell import PlanCell, append_plan_cells, planned_cell, read_plan_cells
from benchmarks.plans.plan_matrix_table import render
from benchmarks.progress import Progress
from vdnn.hardware import load_profile
from vdnn.planning.catalogue import planner_names
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.simulate import simulate
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording

# By name, with the batch that is planned: the ten networks of the vDNN paper, and networks that are trained today, of
# which transformers are in mixed precision or bfloat16.
NETWORKS: dict[str, tuple[Callable[[int], Workload], int]] = {
    **{
        f"{network.name.lower().replace('-', '')}_{network.batch}": (network.make, network.batch)
        for network in models.VDNN_NETWORKS
    },
    "resnet50": (models.resnet50, 128),
    "resnet152": (models.resnet152, 64),
    "densenet121": (models.densenet121, 64),
    "inception_v3": (models.inception_v3, 64),
    "unet": (models.unet, 8),
    "bert_large": (mixed(models.bert_large), 16),
    "gpt2_xl": (mixed(models.gpt2_xl), 4),
    "llama_8b": (models.llama_8b, 1),
    "vit_large": (mixed(models.vit_large), 64),
}
HARDWARE = ("titan-x", "v100-32", "h100", "h200")
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)  # of the way from the least to everything kept
_ERROR = 0.2

CellKey = tuple[str, str, float | None, str]  # network, card, share of the budget, policy


def costs_gone_wrong(recording: Recording, costs: LinkCosts, seed: int = 0) -> tuple[Recording, LinkCosts]:
    """The recording and the costs with each compute time and each rate of the link wrong by up to a fifth."""
    draw = random.Random(seed)
    points = tuple(
        replace(point, compute_ns=round(point.compute_ns * draw.uniform(1 - _ERROR, 1 + _ERROR)))
        for point in recording.points
    )
    out, back = (
        rate * draw.uniform(1 - _ERROR, 1 + _ERROR) for rate in (costs.to_host_bytes_per_s, costs.to_device_bytes_per_s)
    )
    duplex = max(out, back, costs.duplex_bytes_per_s)
    return replace(recording, points=points), LinkCosts(out, back, duplex, costs.latency_ns)


def regret(recording: Recording, costs: LinkCosts, budget_bytes: int, best_ns: int) -> float:
    """The slowdown, under the right costs, of a plan made with wrong costs, relative to `best_ns`."""
    wrong_recording, wrong_costs = costs_gone_wrong(recording, costs)
    plan = plan_step(wrong_recording, wrong_costs, budget_bytes, "auto").plan
    return simulate(recording, plan, costs).step_ns / best_ns - 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells to plan for each network and card. Policies in `run` also run in virtual time. With `has_recomputes`
    off, the planners get a recording without recomputes, so that plans only keep and offload. `done` are cells that the
    file already has."""

    policies: Sequence[str]
    run: Collection[str] = ()
    shares: Sequence[float] = SHARES
    certify: bool = True
    has_regret: bool = True
    has_recomputes: bool = True
    done: Collection[CellKey] = ()

    def missing(self, name: str, hardware: str) -> dict[float, list[str]]:
        """The policies that are not done, by share."""
        missing = {
            share: [policy for policy in self.policies if (name, hardware, share, policy) not in self.done]
            for share in self.shares
        }
        return {share: policies for share, policies in missing.items() if policies}


def without_recomputes(recording: Recording) -> Recording:
    return replace(recording, lifetimes=tuple(replace(one, recompute=None) for one in recording.lifetimes))


def cells_of(name: str, hardware: str, wanted: Matrix) -> Iterator[PlanCell]:
    """The cells of one network and card. The step is rehearsed once for all of them."""
    missing = wanted.missing(name, hardware)
    if not missing:
        return
    make, batch = NETWORKS[name]
    subject = subject_of(make, batch)
    profile = load_profile(hardware)
    recording, costs = rehearse(subject, profile).recording, profile_costs(profile)
    if not wanted.has_recomputes:
        recording = without_recomputes(recording)
    least, most = least_bytes(recording), recording.peak_bytes
    with ExecutedSteps(subject, profile) as steps:
        for share, policies in missing.items():
            budget_bytes = least + round((most - least) * share)
            for policy in policies:
                asked = PlanCell(
                    network=name,
                    batch=batch,
                    hardware=hardware,
                    policy=policy,
                    share=share,
                    budget_bytes=budget_bytes,
                )
                certify = wanted.certify and policy == "auto"
                cell, planned = planned_cell(asked, recording, costs, policy, certify=certify)
                if planned is not None and policy == "auto" and wanted.has_regret:
                    worse = regret(recording, costs, budget_bytes, planned.timeline.step_ns)
                    cell = replace(cell, regret=worse)
                if planned is not None and policy in wanted.run:
                    executed_ns, executed_peak_bytes = steps.run(planned.plan)
                    cell = replace(cell, executed_ns=executed_ns, executed_peak_bytes=executed_peak_bytes)
                yield cell


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    names = list(known) if text == "all" else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise SystemExit(f"plan_matrix: expected {what} among {', '.join(known)}, got {name!r}.")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.plan_matrix", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, metavar="FILE", help="lines of JSON; continued if it exists")
    parser.add_argument("--networks", default="all", metavar="NAMES", help="separated by commas")
    parser.add_argument("--hardware", default=",".join(HARDWARE), metavar="NAMES")
    parser.add_argument("--policies", default="all", metavar="NAMES")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the way from the least budget")
    parser.add_argument("--run", default="auto", metavar="NAMES", help="policies whose plans also run, or none")
    parser.add_argument("--no-bound", action="store_true")
    parser.add_argument("--no-regret", action="store_true")
    parser.add_argument("--without-recomputes", action="store_true", help="plans keep and offload only")
    options = parser.parse_args(arguments)
    networks = _names(options.networks, list(NETWORKS), "networks")
    wanted = Matrix(
        _names(options.policies, planner_names(), "policies"),
        [] if options.run == "none" else _names(options.run, planner_names(), "policies"),
        shares=[float(share) for share in options.shares.split(",")],
        certify=not options.no_bound,
        has_regret=not options.no_regret,
        has_recomputes=not options.without_recomputes,
        done={key_of(cell) for cell in read_plan_cells(options.results)},
    )
    hardware = options.hardware.split(",")
    progress = Progress("plan_matrix", len(networks) * len(hardware))
    for name in networks:
        for card in hardware:
            progress.begin(f"{name} on {card}")
            began_s = time.monotonic()
            count = 0
            for cell in cells_of(name, card, wanted):
                append_plan_cells(options.results, [cell])  # at once, so that no finished cell is lost
                count += 1
            if count:
                seconds = time.monotonic() - began_s
                print(f"{name} on {card}: {count} plans in {seconds:.1f} s", file=sys.stderr)
    progress.end()
    print(render(read_plan_cells(options.results)))
    return 0


def key_of(cell: PlanCell) -> CellKey:
    return cell.network, cell.hardware, cell.share, cell.policy


if __name__ == "__main__":
    sys.exit(main())
