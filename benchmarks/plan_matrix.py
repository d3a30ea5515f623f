"""Every policy on every network, card and budget: what it foretells, whether that is what runs, and who is fastest.

    python -m benchmarks.plan_matrix build/plan_matrix.jsonl --networks resnet50,vit_large --hardware h100 --run auto

A cell is a network on a card under a budget between the least that any plan reaches and what everything kept takes. For
each policy that plans, a line of JSON goes to the file: predicted step and peak, whether it fits, seconds of planning.
For `auto` also the certified bound, and its regret when costs were wrong by up to 20 %; with `--run` the same step run
in virtual time. Cells that the file has already are not done again, so it can be stopped and gone on with. The table
reads only the file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.models as models
from benchmarks.models.workload import Workload
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.errors import BudgetError
from vdnn.hardware import load_profile
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.policies import planner_names
from vdnn.planning.simulate import simulate
from vdnn.recording import Recording
from vdnn.runtime.rehearsal import rehearse, subject_of

# By name, with the batch that is planned: the ten of the vDNN paper, and what is trained today.
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
    "bert_large": (models.bert_large, 16),
    "gpt2_xl": (models.gpt2_xl, 4),
    "llama_8b": (models.llama_8b, 1),
    "vit_large": (models.vit_large, 64),
}
HARDWARE = ("titan-x", "v100-32", "h100", "h200")
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)  # of the way from the least to everything kept
_ERROR = 0.2


def costs_gone_wrong(recording: Recording, costs: LinkCosts, seed: int = 0) -> tuple[Recording, LinkCosts]:
    """Each computing time, and each way of the link, wrong by up to a fifth either way."""
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
    """How much slower the plan is that was made with wrong costs, when it meets the right ones."""
    wrong_recording, wrong_costs = costs_gone_wrong(recording, costs)
    plan = plan_step(wrong_recording, wrong_costs, budget_bytes, "auto").plan
    return simulate(recording, plan, costs).step_ns / best_ns - 1


def cells_of(
    name: str, hardware: str, shares: Sequence[float], policies: Sequence[str], run: Sequence[str], *, certify: bool
) -> Iterator[dict[str, Any]]:
    make, batch = NETWORKS[name]
    subject = subject_of(make, batch)
    profile = load_profile(hardware)
    recording, costs = rehearse(subject, profile).recording, profile_costs(profile)
    least, most = least_bytes(recording), recording.peak_bytes
    for share in shares:
        budget_bytes = least + round((most - least) * share)
        for policy in policies:
            cell = {"network": name, "batch": batch, "hardware": hardware, "share": share, "policy": policy}
            try:
                planned = plan_step(recording, costs, budget_bytes, policy, certify=certify and policy == "auto")
            except BudgetError:
                yield {**cell, "fits": False}
                continue
            cell |= _figures(planned, budget_bytes)
            if policy == "auto":
                cell["regret"] = regret(recording, costs, budget_bytes, planned.timeline.step_ns)
            if policy in run:
                executed = rehearse(subject, profile, plan=planned.plan).timeline
                assert executed is not None, "there was a plan"
                cell["executed_ns"], cell["executed_peak_bytes"] = executed.step_ns, executed.peak_bytes
            yield cell


def _figures(planned: PlannedStep, budget_bytes: int) -> dict[str, Any]:
    return {
        "points": len(planned.recording.points),
        "budget_bytes": budget_bytes,
        "fits": planned.timeline.peak_bytes <= budget_bytes,
        "keep_ns": planned.recording.compute_ns,
        "step_ns": planned.timeline.step_ns,
        "peak_bytes": planned.timeline.peak_bytes,
        "bound_ns": None if planned.bound is None else planned.bound.step_ns,
        "plan_seconds": round(planned.plan_seconds, 3),
    }


# Reading.


def render(cells: Sequence[dict[str, Any]]) -> str:
    by_cell: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        by_cell.setdefault((cell["network"], cell["hardware"], cell["share"]), {})[cell["policy"]] = cell
    policies = list(dict.fromkeys(cell["policy"] for cell in cells))
    rows = []
    for policy in policies:
        mine = [found[policy] for found in by_cell.values() if policy in found]
        fitting = [cell for cell in mine if cell["fits"]]
        ratios = [
            cell["step_ns"] / best["step_ns"]
            for found in by_cell.values()
            if (cell := found.get(policy)) and cell["fits"] and (best := found.get("auto"))
        ]
        rows.append(
            (
                policy,
                f"{len(fitting)} of {len(mine)}",
                f"{statistics.median(ratios):.3f}" if ratios else "",
                f"{max(ratios):.2f}" if ratios else "",
                str(sum(ratio < 1 for ratio in ratios)),
                f"{max(cell.get('plan_seconds', 0) for cell in mine):.2f}",
            )
        )
    header = ("policy", "fits", "median / auto", "worst / auto", "faster than auto", "most seconds")
    return render_table("Plans of all policies", header, rows, _remarks(cells))


def _remarks(cells: Sequence[dict[str, Any]]) -> list[str]:
    remarks = []
    gaps = sorted(
        max(0.0, cell["step_ns"] / cell["bound_ns"] - 1)
        for cell in cells
        if cell["policy"] == "auto" and cell["fits"] and cell.get("bound_ns")
    )
    if gaps:
        near = sum(gap <= 0.02 for gap in gaps) / len(gaps)
        remarks.append(
            f"Certified gap of auto over {len(gaps)} cells: median {100 * statistics.median(gaps):.2f} %, "
            f"95th percentile {100 * gaps[int(0.95 * (len(gaps) - 1))]:.2f} %, worst {100 * gaps[-1]:.2f} %; "
            f"{100 * near:.1f} % of the cells are within 2 %."
        )
    executed = [cell for cell in cells if "executed_ns" in cell]
    same = sum(
        cell["executed_ns"] == cell["step_ns"] and cell["executed_peak_bytes"] == cell["peak_bytes"]
        for cell in executed
    )
    if executed:
        remarks.append(f"Run in virtual time: {same} of {len(executed)} steps as foretold, to the nanosecond and byte.")
    regrets = [cell["regret"] for cell in cells if "regret" in cell]
    if regrets:
        remarks.append(
            f"Regret of auto with costs wrong by up to 20 %: median {100 * statistics.median(regrets):.2f} %, worst "
            f"{100 * max(regrets):.2f} %."
        )
    return remarks


def read(path: Path) -> list[dict[str, Any]]:
    """A line that was cut off in the middle is done again."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    names = list(known) if text == "all" else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise SystemExit(f"plan_matrix: expected {what} among {', '.join(known)}, got {name!r}.")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_matrix", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, metavar="FILE", help="lines of JSON; gone on with if it is there")
    parser.add_argument("--networks", default="all", metavar="NAMES", help="separated by commas")
    parser.add_argument("--hardware", default=",".join(HARDWARE), metavar="NAMES")
    parser.add_argument("--policies", default="all", metavar="NAMES")
    parser.add_argument("--run", default="auto", metavar="NAMES", help="policies that are run too; none for none")
    parser.add_argument("--no-bound", action="store_true")
    options = parser.parse_args(arguments)
    networks = _names(options.networks, list(NETWORKS), "networks")
    policies = _names(options.policies, planner_names(), "policies")
    run = [] if options.run == "none" else _names(options.run, planner_names(), "policies")
    hardware = options.hardware.split(",")
    done = {(cell["network"], cell["hardware"]) for cell in read(options.results) if cell["share"] == SHARES[-1]}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress("plan_matrix", len(networks) * len(hardware))
    for name in networks:
        for card in hardware:
            progress.begin(f"{name} on {card}")
            if (name, card) in done:
                continue
            with options.results.open("a") as lines:
                for cell in cells_of(name, card, SHARES, policies, run, certify=not options.no_bound):
                    lines.write(json.dumps(cell) + "\n")
                    lines.flush()
    progress.end()
    print(render(read(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
