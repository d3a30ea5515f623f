"""Trains cases whose shapes change from step to step under a budget, in virtual time, and compares their steps.

    python -m benchmarks.shapes                                      # all cases: minutes
    python -m benchmarks.shapes --cases "decoder,two models in turn" --steps
    python -m benchmarks.shapes --json after.jsonl --before before.jsonl

Each step is compared with what its size reaches alone under the same budget, once a session has made a plan for it.
`--before` takes the file that another version of vdnn wrote with --json, and prints both in one table.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.progress import Progress
from benchmarks.shapes.cases import CASES
from benchmarks.shapes.figures import LEARNING_STEPS, LEARNING_STEPS_BESIDE, CaseFigures
from benchmarks.shapes.measure import BUDGET_SHARE, HARDWARE, measure
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError

_HEADER = (
    "case",
    "over",
    "peak",
    "own",
    "kept",
    "worst",
    "first",
    "pinned",
    "at end",
    "plans",
    "waits",
    "sessions",
    "wall s",
)
_REMARKS = (
    f"Budget: {BUDGET_SHARE:.0%} of the largest step's peak with everything kept, on {HARDWARE}; virtual time.",
    "over, peak: the steps over the budget, and the largest peak over the budget.",
    f"own, kept: time of the steps behind the first {LEARNING_STEPS}, over that of their sizes' own plans, and over "
    "that with everything kept. worst, first: the slowest step over its own plan, without and among the first steps "
    "of each structure.",
    "pinned: the most host memory pinned at one time, over the most that an own plan offloads. at end: host memory "
    "that is pinned at the end, over the most that a plan of the training offloads. plans: how many were made.",
    "waits: processor time of planning on this machine, over the virtual time of all steps.",
    f"sessions: a session for each step, over one around all, behind the first {LEARNING_STEPS_BESIDE}. wall s: of "
    "the training on this machine.",
)
_WORST_SHOWN = 3


def _row(name: str, case: CaseFigures) -> tuple[str, ...]:
    pinned, at_end, sessions = case.pinned_over_moved, case.pinned_at_end, case.over_one_session
    return (
        name,
        f"{len(case.over_budget)} of {len(case.steps)}",
        f"{case.largest_share:.3f}",
        f"{case.over_own_plans:.3f}",
        f"{case.over_kept:.3f}",
        f"{case.worst_step:.2f}",
        f"{case.worst_first_step:.2f}",
        "-" if pinned is None else f"{pinned:.2f}",
        "-" if at_end is None else f"{at_end:.2f}",
        str(case.plans),
        "-" if case.waiting_share is None else f"{case.waiting_share:.1%}",
        "-" if sessions is None else f"{sessions:.3f}",
        f"{case.wall_s:.1f}",
    )


def render(cases: Sequence[CaseFigures], before: Mapping[str, CaseFigures]) -> str:
    rows = []
    for case in cases:
        if case.name in before:
            rows += [_row(f"{case.name}: before", before[case.name]), _row("  after", case)]
        else:
            rows.append(_row(case.name, case))
    mean = f"own, in the mean: {_mean_over_own_plans(cases):.3f}"
    both = [case for case in cases if case.name in before]
    if both:
        earlier = _mean_over_own_plans([before[case.name] for case in both])
        mean += f"; of the {len(both)} with a before: {earlier:.3f} before, {_mean_over_own_plans(both):.3f} after"
    waits = []
    if all(case.planning_s is not None for case in cases):
        share = sum(case.planning_s or 0.0 for case in cases) / sum(case.step_s for case in cases)
        waits.append(f"waits, all cases together: {share:.1%}.")
    return render_table("Steps whose shapes change", _HEADER, rows, [f"{mean}.", *waits, *_REMARKS])


def _mean_over_own_plans(cases: Sequence[CaseFigures]) -> float:
    return sum(case.over_own_plans for case in cases) / len(cases)


def render_steps(case: CaseFigures) -> str:
    """All steps of a case, with marks at those over the budget and at the slowest."""
    worst = sorted(case.steps, key=lambda step: -step.over_own_plan)[:_WORST_SHOWN]
    rows = []
    for index, step in enumerate(case.steps):
        marks = [
            "OVER" if step.trained.peak_bytes > case.budget_bytes else "",
            "first" if step.is_first_of_structure else "",
            "slow" if step in worst else "",
        ]
        rows.append(
            (
                f"{index + 1}: {', '.join(map(str, step.size))}",
                f"{step.kept.peak_bytes / case.budget_bytes:.3f}",
                f"{step.alone.peak_bytes / case.budget_bytes:.3f}",
                f"{step.trained.peak_bytes / case.budget_bytes:.3f}",
                f"{step.alone.step_ns / step.kept.step_ns:.3f}",
                f"{step.over_own_plan:.3f}",
                " ".join(filter(None, marks)),
            )
        )
    return render_table(
        f"{case.name}: budget {format_bytes(case.budget_bytes)}",
        ("step: size", "kept peak", "own peak", "peak", "own / kept", "time / own", ""),
        rows,
        ["Peaks are shares of the budget."],
    )


def read(path: Path) -> dict[str, CaseFigures]:
    found = [CaseFigures.from_json(json.loads(line)) for line in path.read_text().splitlines()]
    return {case.name: case for case in found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shapes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", default=",".join(names), metavar="NAMES", help="separated by commas")
    parser.add_argument("--steps", action="store_true", help="also print each step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, a line for each case")
    parser.add_argument("--before", type=Path, metavar="FILE", help="figures of another version")
    options = parser.parse_args(arguments)
    wanted = options.cases.split(",")
    for name in wanted:
        if name not in names:
            raise SystemExit(f"shapes: expected cases among {', '.join(names)}, got {name!r}.")
    # What sessions say of their budgets is in the table.
    logging.getLogger("vdnn").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found, failures, progress = [], [], Progress("shapes", len(wanted))
    for case in (case for case in CASES if case.name in wanted):
        progress.begin(case.name)
        try:
            found.append(measure(case))
        except VdnnError as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text("".join(json.dumps(one.as_json()) + "\n" for one in found))
    progress.end()
    if options.steps:
        print("\n\n".join([*map(render_steps, found), ""]))
    if found:
        print(render(found, {} if options.before is None else read(options.before)))
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
