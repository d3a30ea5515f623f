"""The table of a matrix of plans: each policy relative to `auto`, with certified gaps and steps that ran."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from benchmarks.plans.plan_cell import PlanCell
from benchmarks.text_table import render_table

_NEAR = 0.02  # the certified gap that we aim at
_JOINT = 0.03  # the gap that we aim at if plans also recompute
_LONGEST_LIST = 12


def render(cells: Sequence[PlanCell]) -> str:
    by_cell: dict[tuple[object, ...], dict[str, PlanCell]] = {}
    for cell in cells:
        by_cell.setdefault((cell.network, cell.hardware, cell.share), {})[cell.policy] = cell
    rows = [_row(policy, list(by_cell.values())) for policy in dict.fromkeys(cell.policy for cell in cells)]
    header = ("policy", "fits", "median / auto", "worst / auto", "faster than auto", "most seconds", "as predicted")
    cards = dict.fromkeys(cell.hardware for cell in cells)
    networks = dict.fromkeys(cell.network for cell in cells)
    title = f"Plans of all policies: {len(networks)} networks, {', '.join(cards)}; {len(by_cell)} cells"
    remarks = [
        *_gaps(cells),
        *_runs(cells),
        *_regrets(cells),
        *_growing_budgets(cells),
        *_faster(list(by_cell.values())),
    ]
    return render_table(title, header, rows, remarks)


def _row(policy: str, by_cell: Sequence[dict[str, PlanCell]]) -> tuple[str, ...]:
    mine = [found[policy] for found in by_cell if policy in found]
    ratios = [
        cell.slowdown / best.slowdown
        for found in by_cell
        if (cell := found.get(policy)) and cell.fits and (best := found.get("auto"))
    ]
    executed = [cell for cell in mine if cell.executed_ns]
    return (
        policy,
        f"{sum(cell.fits for cell in mine)} of {len(mine)}",
        f"{statistics.median(ratios):.3f}" if ratios else "",
        f"{max(ratios):.2f}" if ratios else "",
        str(sum(ratio < 1 for ratio in ratios)),
        f"{max(cell.plan_seconds for cell in mine):.2f}",
        f"{sum(cell.is_as_predicted for cell in executed)} of {len(executed)}" if executed else "",
    )


def _gaps(cells: Sequence[PlanCell]) -> list[str]:
    autos = [cell for cell in cells if cell.policy == "auto" and cell.fits]
    bounded = [(gap, cell) for cell in autos if (gap := cell.certified_gap) is not None]
    if not bounded:
        return []
    bounded.sort(key=lambda one: one[0])
    gaps = [gap for gap, _ in bounded]
    near = sum(gap <= _NEAR for gap in gaps)
    said = [
        f"Certified gap of auto over {len(gaps)} cells: median {100 * statistics.median(gaps):.2f} %, "
        f"90th percentile {_percentile(gaps, 0.9)}, 95th {_percentile(gaps, 0.95)}, worst {100 * gaps[-1]:.2f} %; "
        f"{near} cells, {100 * near / len(gaps):.1f} %, are within {100 * _NEAR:.0f} %, "
        f"{100 * sum(gap <= _JOINT for gap in gaps) / len(gaps):.1f} % within {100 * _JOINT:.0f} %, "
        f"{sum(gap == 0 for gap in gaps)} are certified optimal."
    ]
    for share in sorted({cell.share or 0.0 for _, cell in bounded}):
        gaps = [gap for gap, cell in bounded if cell.share == share]
        said.append(
            f"At {100 * share:.0f} % of the way from the least budget: median {100 * statistics.median(gaps):.2f} %, "
            f"90th percentile {_percentile(gaps, 0.9)}, worst {100 * gaps[-1]:.2f} %; {len(gaps)} cells."
        )
    wide = [cell for gap, cell in reversed(bounded) if gap > _NEAR]
    if wide:
        counts = Counter(f"{cell.network} on {cell.hardware}" for cell in wide)
        said.append(f"Beyond {100 * _NEAR:.0f} %: " + ", ".join(f"{where} {count}" for where, count in counts.items()))
    return said


def _percentile(in_order: Sequence[float], part: float) -> str:
    return f"{100 * in_order[int(part * (len(in_order) - 1))]:.2f} %"


def _runs(cells: Sequence[PlanCell]) -> list[str]:
    executed = [cell for cell in cells if cell.executed_ns]
    if not executed:
        return []
    same = sum(cell.is_as_predicted for cell in executed)
    return [f"Run in virtual time: {same} of {len(executed)} steps as predicted, to the nanosecond and byte."]


def _regrets(cells: Sequence[PlanCell]) -> list[str]:
    regrets = [cell.regret for cell in cells if cell.regret is not None]
    if not regrets:
        return []
    return [
        f"Regret of auto with costs wrong by up to 20 %, over {len(regrets)} cells: median "
        f"{100 * statistics.median(regrets):.2f} %, worst {100 * max(regrets):.2f} %."
    ]


def _growing_budgets(cells: Sequence[PlanCell]) -> list[str]:
    """Counts pairs in which a larger budget gave auto a longer step, which must not happen."""
    autos = [cell for cell in cells if cell.policy == "auto" and cell.fits]
    autos.sort(key=lambda cell: (cell.network, cell.hardware, cell.share or 0.0))
    pairs = [
        (less, more)
        for less, more in itertools.pairwise(autos)
        if (less.network, less.hardware) == (more.network, more.hardware)
    ]
    slower = sum(more.slowdown > less.slowdown for less, more in pairs)
    return [f"From a budget to the next larger one auto is slower in {slower} of {len(pairs)} pairs."] if pairs else []


def _faster(by_cell: Sequence[dict[str, PlanCell]]) -> list[str]:
    """Lists the cells in which auto is not the fastest, the worst first."""
    found = []
    for policies in by_cell:
        auto = policies.get("auto")
        fitting = [cell for cell in policies.values() if cell.fits]
        if auto is None or not fitting:
            continue
        best = min(fitting, key=lambda cell: cell.slowdown)
        if best.slowdown < auto.slowdown:
            found.append((auto.slowdown / best.slowdown - 1, best))
    if not found:
        return ["Nobody is faster than auto in any cell."]
    found.sort(key=lambda one: -one[0])
    listed = [
        f"{cell.policy} on {cell.network}, {cell.hardware}, {100 * (cell.share or 0.0):.0f} %: {100 * by:.3f} %"
        for by, cell in found[:_LONGEST_LIST]
    ]
    more = "" if len(found) <= _LONGEST_LIST else f", and {len(found) - _LONGEST_LIST} more"
    return [f"Faster than auto in {len(found)} cells: " + "; ".join(listed) + more]
