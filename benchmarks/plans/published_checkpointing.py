"""Compares published systems that recompute with `auto`, on the steps of their published figures, at the same budget.

    python -m benchmarks.plans.published_checkpointing benchmarks/results/published_checkpointing.jsonl

A row is a network at a batch on a card (published_rows.py). Its step is rehearsed without data; every re-implemented
policy and `auto` plan it under the row's budget. A line of JSON for each plan goes to the file, with its simulated peak
and step. Rows that the file already has are not planned again. The table reads only the file: for each row it has the
system's own policy, the published figure, `auto`, and the reason if the policy misses the published figure. A second
table compares all policies with `auto`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.plans.plan_cell import PlanCell, append_plan_cells, planned_cell, read_plan_cells
from benchmarks.plans.published_rows import CARD, LEAST, NETWORKS, ROWS, Row
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes
from vdnn.hardware import load_profile
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.planning.published.megengine_sublinear import MegengineSublinear, SublinearConfig
from vdnn.planning.published.recomputed_steps import RecomputedSteps
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording

# MegEngine's genetic search is off by default.
GENERATIONS = 20
GENETIC = "megengine-genetic"
POLICIES = ("chen-sqrt", "chen-recursive", "megengine-sublinear", GENETIC, "dtr", "capuchin-full", "auto")

STAND_IN = "Another network than the published one:"
NO_RECIPE = "Too little of what the step saves can be recomputed: the share of its bytes is in brackets."
ONCE = "Recomputed once, a storage stays: what was published gives it up and recomputes it again, which no plan says."
LINK = "Over the card's memory the link carries most of it; the published figure is a batch that trained, at any speed."
PASS = (
    "Nearly all of the forward pass is computed again, about a third of a step that does nothing but compute; what was "
    "published is a share of measured steps, in which other things take time, too."
)


def cells_of(row: Row, recording: Recording, costs: LinkCosts, card_bytes: int) -> Iterator[PlanCell]:
    candidates = RecomputedSteps(recording).candidates
    asked = PlanCell(
        network=row.network,
        batch=row.batch,
        hardware=row.card,
        policy="",
        row=row.key,
        budget_bytes=_budget_bytes(row, recording, costs, card_bytes),
        card_bytes=card_bytes,
        resident_bytes=recording.resident_bytes,
        recomputed_share=sum(recording.lifetimes[one].nbytes for one in candidates) / recording.managed_bytes,
    )
    for policy in POLICIES:
        yield planned_cell(replace(asked, policy=policy), recording, costs, _planner(policy))[0]


def _planner(policy: str) -> str | PlanPolicy:
    return MegengineSublinear(SublinearConfig(genetic_nr_iter=GENERATIONS)) if policy == GENETIC else policy


def _budget_bytes(row: Row, recording: Recording, costs: LinkCosts, card_bytes: int) -> int:
    if row.budget == CARD:
        return card_bytes
    if row.budget == LEAST:
        return plan_step(recording, costs, None, row.policy).timeline.peak_bytes
    return int(float(row.budget) * recording.peak_bytes)


# The table.


def render(cells: Sequence[PlanCell]) -> str:
    by_row: dict[str, dict[str, PlanCell]] = {}
    for cell in cells:
        by_row.setdefault(cell.row or "", {})[cell.policy] = cell
    known = [(row, by_row[row.key]) for row in ROWS if len(by_row.get(row.key, ())) == len(POLICIES)]
    header = ("row", "budget", "of kept", "policy", "published", "here", "auto", "why")
    notes: dict[str, int] = {}
    lines = [_line(row, found, notes) for row, found in known]
    remarks = [*(f"{number}) {note}" for note, number in notes.items()), *_largest_batches(known)]
    first = render_table("Steps over everything kept, by recomputing", header, lines, remarks)
    against = [_against_auto(policy, [found for _, found in known]) for policy in POLICIES[:-1]]
    names = ("policy", "fits", "auto fits", "least / auto", "most / auto", "faster than auto")
    return first + "\n\n" + render_table("All policies under these budgets, beside auto", names, against)


def _line(row: Row, found: dict[str, PlanCell], notes: dict[str, int]) -> tuple[str, ...]:
    cell, auto = found[row.policy], found["auto"]
    why = [str(notes.setdefault(note, len(notes) + 1)) for note in _whys(row, cell)]
    return (
        f"{row.system}: {row.network}, {row.batch}, {row.card}",
        format_bytes(cell.budget_bytes),
        f"{100 * cell.budget_bytes / cell.keep_bytes:.0f} %",
        row.policy,
        "" if row.slowdown is None else f"{row.slowdown:.2f}",
        _took(cell),
        _took(auto),
        ",".join(why),
    )


def _took(cell: PlanCell) -> str:
    if cell.fits:
        return f"{cell.slowdown:.3f}"
    if not cell.peak_bytes:
        return "no plan"
    return f"over: {100 * cell.peak_bytes / cell.keep_bytes:.0f} % ({100 * cell.recomputed_share:.0f} %)"


def _whys(row: Row, cell: PlanCell) -> Iterator[str]:
    if row.remark:
        yield f"{STAND_IN} {row.remark}."
    if not cell.fits:
        yield row.miss or (ONCE if cell.recomputed_share > 0.9 else NO_RECIPE)
    elif row.slowdown is not None and cell.slowdown > row.slowdown:
        yield PASS
    elif row.budget == CARD and row.system == "Capuchin" and cell.slowdown > 2:
        yield LINK


def _largest_batches(known: Sequence[tuple[Row, dict[str, PlanCell]]]) -> list[str]:
    """MegEngine's largest batches, by a straight line from the resident bytes."""
    found = [(row, cells[row.policy]) for row, cells in known if row.system == "MegEngine" and row.budget == LEAST]
    return [
        f"Largest batch of {row.network} on {row.card}, by a straight line from {row.batch}: "
        f"{_scaled(row, cell, cell.keep_bytes)} with everything kept (published: 133), "
        f"{_scaled(row, cell, cell.peak_bytes)} with {row.policy} (published: 262)."
        for row, cell in found
    ]


def _scaled(row: Row, cell: PlanCell, peak_bytes: int) -> int:
    room_bytes = cell.card_bytes - cell.resident_bytes
    return int(row.batch * room_bytes / (peak_bytes - cell.resident_bytes))


def _against_auto(policy: str, rows: Sequence[dict[str, PlanCell]]) -> tuple[str, ...]:
    both = [found for found in rows if found[policy].fits and found["auto"].fits]
    ratios = [found[policy].slowdown / found["auto"].slowdown for found in both]
    return (
        policy,
        f"{sum(found[policy].fits for found in rows)} of {len(rows)}",
        f"{sum(found['auto'].fits for found in rows)}",
        f"{min(ratios):.3f}" if ratios else "",
        f"{max(ratios):.3f}" if ratios else "",
        str(sum(ratio < 1 for ratio in ratios)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.published_checkpointing")
    parser.add_argument("results", type=Path, metavar="FILE", help="lines of JSON; continued if it exists")
    parser.add_argument("--systems", default="", metavar="NAMES", help="separated by commas; all by default")
    options = parser.parse_args(arguments)
    _measure(options.results, [name for name in options.systems.split(",") if name])
    print(render(read_plan_cells(options.results)))
    return 0


def _measure(results: Path, systems: Sequence[str]) -> None:
    done = {cell.row for cell in read_plan_cells(results) if cell.policy == POLICIES[-1]}
    rows = [row for row in ROWS if row.key not in done and (not systems or row.system in systems)]
    progress = Progress("published_checkpointing", len(rows))
    step: tuple[tuple[str, int, str], Recording] | None = None
    for row in rows:
        progress.begin(row.key)
        profile = load_profile(row.card)
        subject = row.network, row.batch, row.card
        if step is None or step[0] != subject:
            step = subject, rehearse(subject_of(NETWORKS[row.network], row.batch), profile).recording
        for cell in cells_of(row, step[1], profile_costs(profile), profile.memory_bytes):
            append_plan_cells(results, [cell])
    progress.end()


if __name__ == "__main__":
    sys.exit(main())
