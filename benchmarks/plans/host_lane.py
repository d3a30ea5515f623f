"""Plans with the host lane beside plans without it, on hosts that issue 1, 2 and 4 times as slowly.

    python -m benchmarks.plans.host_lane build/host_lane.jsonl --networks gpt2,resnet50 --hardware h200

A cell is a network on a card under a budget between the least that any plan reaches and everything kept, beside the
host that was measured with an H200, or one that needs a multiple of its time. A line of JSON goes to the file with the
step under that host of three plans: the one that the search makes for a host that takes no time, the one that it makes
with the lane, and the best of the published policies that is under the budget. Cells that the file already has are not
run again. The table reads only the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import benchmarks.models as models
from benchmarks.models.mixed_precision import mixed
from benchmarks.plans.plan_matrix import NETWORKS, SHARES
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.errors import VdnnError
from vdnn.hardware import HostFigures, load_profile
from vdnn.planning.catalogue import planner_names
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.simulate import simulate
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording

_ZOO = {**NETWORKS, "gpt2": (mixed(models.gpt2), 16), "bert_base": (mixed(models.bert_base), 32)}
_HARDWARE = ("v100-32", "h100", "h200")
_HOST_OF = "h200"  # the profile whose host was measured
_FACTORS = (1, 2, 4)
# They plan for minutes or are not under budgets, and no published policy of a step was faster in the plan matrix.
_LEFT_OUT = frozenset({"auto", "auto-offload", "swapadvisor", "megengine-sublinear"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One network, card, budget and host. Times are of steps under that host; `device_ns` is that of the plan without
    the lane on a host that takes no time. `gap` and `gap_without` are certified, None if they were not asked for."""

    network: str
    hardware: str
    share: float
    factor: int
    kept_ns: int
    device_ns: int
    without_ns: int
    with_ns: int
    host_ns: int
    without_recomputes: int
    with_recomputes: int
    published_ns: int | None
    published: str
    gap: float | None
    gap_without: float | None
    seconds: float
    seconds_without: float

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.network, self.hardware, self.share, self.factor

    @property
    def is_bound_by_host(self) -> bool:
        """True if the plan without the lane is: for others the lane changes nothing."""
        return self.without_ns > self.device_ns


def _slowed(recording: Recording, costs: LinkCosts, factor: int) -> tuple[Recording, LinkCosts]:
    return recording.with_issue_times(factor), replace(costs, issue_ns=costs.issue_ns * factor)


def _recomputes(planned: PlannedStep) -> int:
    return sum(one.is_recomputed for one in planned.plan.lifetimes)


def _published(recording: Recording, costs: LinkCosts, budget: int) -> tuple[int | None, str]:
    """The shortest step of a published policy under the budget."""
    best: tuple[int, str] | None = None
    for name in planner_names():
        if name in _LEFT_OUT:
            continue
        try:
            planned = plan_step(recording, costs, budget, name)
        except VdnnError:
            continue
        if planned.fits and (best is None or planned.timeline.step_ns < best[0]):
            best = planned.timeline.step_ns, name
    return (None, "") if best is None else best


def cells_of(network: str, hardware: str, done: set[tuple[str, str, float, int]], *, certify: bool) -> Iterator[Cell]:
    make, batch = _ZOO[network]
    keys = [(share, factor) for share in SHARES for factor in _FACTORS]
    if all((network, hardware, *key) in done for key in keys):
        return
    profile, host = load_profile(hardware), HostFigures.of(load_profile(_HOST_OF))
    recorded = rehearse(subject_of(make, batch), profile, host=host).recording
    for share in SHARES:
        least, most = least_bytes(recorded), recorded.peak_bytes
        budget = least + round(share * (most - least))
        alone, link = recorded.without_host(), profile_costs(profile)
        without = plan_step(alone, link, budget, certify=certify)
        for factor in _FACTORS:
            if (network, hardware, share, factor) in done:
                continue
            recording, costs = _slowed(recorded, profile_costs(profile, host), factor)
            planned = plan_step(recording, costs, budget, certify=certify)
            published_ns, published = _published(recording, costs, budget)
            gaps = [None if one.bound is None else one.bound.gap(one.timeline.step_ns) for one in (planned, without)]
            yield Cell(
                network=network,
                hardware=hardware,
                share=share,
                factor=factor,
                kept_ns=recording.kept_ns,
                device_ns=without.timeline.step_ns,
                without_ns=simulate(recording, without.plan, costs).step_ns,
                with_ns=planned.timeline.step_ns,
                host_ns=planned.timeline.host_ns,
                without_recomputes=_recomputes(without),
                with_recomputes=_recomputes(planned),
                published_ns=published_ns,
                published=published,
                gap=gaps[0],
                gap_without=gaps[1],
                seconds=round(planned.plan_seconds, 3),
                seconds_without=round(without.plan_seconds, 3),
            )


def render(cells: Sequence[Cell]) -> str:
    header = (
        "issue",
        "cells",
        "bound by host",
        "slower than without",
        "speedup",
        "most",
        "recomputes",
        "slower than a",
    )
    rows = []
    for factor in sorted({cell.factor for cell in cells}):
        own = [cell for cell in cells if cell.factor == factor]
        bound = [cell for cell in own if cell.is_bound_by_host]
        speedups = [cell.without_ns / cell.with_ns for cell in bound] or [1.0]
        before, after = sum(cell.without_recomputes for cell in bound), sum(cell.with_recomputes for cell in bound)
        rows.append(
            (
                f"x {factor}",
                str(len(own)),
                str(len(bound)),
                str(sum(cell.with_ns > cell.without_ns for cell in own)),
                f"{statistics.median(speedups):.3f} x",
                f"{max(speedups):.3f} x",
                f"{before} -> {after}",
                str(sum(cell.published_ns is not None and cell.with_ns > cell.published_ns for cell in own)),
            )
        )
    return render_table("Plans with the host lane", header, rows, tuple(_remarks(cells)))


def _remarks(cells: Sequence[Cell]) -> Iterator[str]:
    yield (
        "Bound by host: the plan without the lane is, under that host. Slower than without: cells in which the plan "
        "with the lane is slower than the one without. Speedup, median and most, and recomputes of all plans, without "
        "and with the lane: of the cells that are bound by the host. The last column: cells in which a published "
        "policy is faster."
    )
    others = [cell for cell in cells if not cell.is_bound_by_host and cell.gap is not None]
    if others:
        wider = [cell for cell in others if (cell.gap or 0) > (cell.gap_without or 0) + 0.01]
        yield (
            f"Certified gaps, of {len(others)} cells that the host does not bound: wider than without the lane by more "
            f"than 1 % in {len(wider)}."
        )
    certified = [cell for cell in cells if cell.is_bound_by_host and cell.gap is not None]
    if certified:
        gaps = sorted(100 * (cell.gap or 0) for cell in certified)
        yield (
            f"Certified gaps, of {len(certified)} cells that it bounds: median {statistics.median(gaps):.1f} %, most "
            f"{gaps[-1]:.1f} %."
        )
    slower = [cell for cell in cells if cell.published_ns is not None and cell.with_ns > cell.published_ns]
    for cell in slower:
        excess = 100 * (cell.with_ns / (cell.published_ns or 1) - 1)
        yield (
            f"{cell.network} on {cell.hardware} at {cell.share:g}, x {cell.factor}: {cell.published} is "
            f"{excess:.2f} % faster."
        )
    bound = [cell for cell in cells if cell.is_bound_by_host]
    if bound:
        seconds, before = sum(cell.seconds for cell in bound), sum(cell.seconds_without for cell in bound)
        yield f"Where the host bounds the step, planning takes {seconds / max(before, 1e-9):.1f} times as long."


def read_cells(path: Path) -> list[Cell]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Cell(**json.loads(line)) for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.host_lane", description=__doc__)
    parser.add_argument("file", type=Path, help="the lines of JSON, which are continued")
    parser.add_argument("--networks", default=",".join(_ZOO), help="names, separated by commas. Default: all")
    parser.add_argument("--hardware", default=",".join(_HARDWARE))
    parser.add_argument("--certify", action="store_true", help="also the bounds, which take longer than all else")
    options = parser.parse_args(arguments)
    done = {cell.key for cell in read_cells(options.file)}
    parts = [(network, card) for network in options.networks.split(",") for card in options.hardware.split(",")]
    progress = Progress("host_lane", len(parts))
    for network, card in parts:
        progress.begin(f"{network} on {card}")
        for cell in cells_of(network, card, done, certify=options.certify):
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
    progress.end()
    print(render(read_cells(options.file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
