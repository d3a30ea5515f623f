"""The table of all cells: how auto compares with each published policy, and how near it is to its bound."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from benchmarks.text_table import render_table
from benchmarks.whole_state.cells import Cell, Planned
from benchmarks.whole_state.machines import MACHINES
from vdnn.planning.published.whole_state import WHOLE_STATE_POLICIES

_EVEN = 1.0005  # steps that differ by less take equally long
_ZERO_OFFLOAD = "zero-offload"


def table_of(cells: Sequence[Cell]) -> str:
    parts = [_policies(cells), _gaps(cells), _growth(cells), _executed(cells), _times(cells), _each(cells), _sources()]
    return "\n\n".join(parts)


def _policies(cells: Sequence[Cell]) -> str:
    rows = []
    for policy in WHOLE_STATE_POLICIES:
        both = [(cell, cell.policies[policy.name]) for cell in cells if policy.name in cell.policies and cell.free]
        beside_free = [step_ns / cell.free.step_ns for cell, step_ns in both if cell.free]
        beside_exact = [step_ns / cell.exact.step_ns for cell, step_ns in both if cell.exact]
        rows.append(
            (
                policy.name + (" (another training)" if policy.is_another_training else ""),
                str(len(both)),
                _median(beside_free),
                _least(beside_free),
                str(sum(ratio * _EVEN < 1 for ratio in beside_free)),
                _median(beside_exact),
                _least(beside_exact),
            )
        )
    fit, fit_free = (
        sum(one is not None for one in ones) for ones in zip(*((c.exact, c.free) for c in cells), strict=True)
    )
    refused = [cell.name for cell in cells if cell.exact is None]
    remarks = [
        f"auto fits {fit} of {len(cells)} cells exactly and {fit_free} with steps on the CPU. Ratios are the time of a "
        "policy's step divided by that of auto.",
        "Refused, because the device or the host is too small: " + (", ".join(refused) or "none") + ".",
    ]
    header = ("policy", "cells", "median / auto", "least", "faster", "median / exact", "least")
    return render_table("Whole trainings: published policies beside auto, virtual time", header, rows, remarks)


def _gaps(cells: Sequence[Cell]) -> str:
    rows = []
    for name, ones in (("exact", [c.exact for c in cells]), ("steps on the CPU allowed", [c.free for c in cells])):
        gaps = sorted(one.gap for one in ones if one is not None)
        if gaps:
            within = sum(gap <= 0.03 for gap in gaps) / len(gaps)
            ninetieth = gaps[min(len(gaps) - 1, int(0.9 * len(gaps)))]
            figures = (statistics.median(gaps), ninetieth, gaps[-1], within)
            rows.append((name, str(len(gaps)), *(f"{100 * figure:.1f} %" for figure in figures)))
    header = ("auto", "cells", "median gap", "90th percentile", "worst", "within 3 %")
    return render_table("Certified gaps: the step of auto over its lower bound", header, rows)


def _growth(cells: Sequence[Cell]) -> str:
    slower = []
    for before, after in itertools.permutations(cells, 2):
        if (before.model, before.machine) == (after.model, after.machine) and before.share < after.share:
            slower += [
                f"{after.model} on {after.machine} at {after.share:.0%} takes {ratio:.4f} of {before.share:.0%}, {how}"
                for how, less, more in (("exact", before.exact, after.exact), ("free", before.free, after.free))
                if less and more and (ratio := more.step_ns / less.step_ns) > _EVEN
            ]
    return "Slower with more memory: " + ("; ".join(sorted(slower)) or "never") + "."


def _executed(cells: Sequence[Cell]) -> str:
    plans = [(cell.name, one) for cell in cells for one in (cell.exact, cell.free) if one]
    others = [name for name, one in plans if not one.is_executed]
    same = len(plans) - len(others)
    return (
        f"Executed as a program of streams and events, {same} of {len(plans)} plans took as long, held as much and "
        f"moved as much as simulated, to the nanosecond and the byte. Others: {', '.join(others) or 'none'}."
    )


def _times(cells: Sequence[Cell]) -> str:
    seconds = [one.plan_s for cell in cells for one in (cell.exact, cell.free) if one]
    if not seconds:
        return "No plans."
    return f"Processor time of a plan: median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s."


def _each(cells: Sequence[Cell]) -> str:
    rows = [
        (
            cell.name,
            f"{cell.computing_ns / 1e9:.2f}",
            *_columns(cell.exact, cell.computing_ns),
            *_columns(cell.free, cell.computing_ns),
            _ratio(cell.policies.get(_ZERO_OFFLOAD), cell.computing_ns),
            _ratio(min(cell.policies.values(), default=None), cell.computing_ns),
        )
        for cell in cells
    ]
    header = (
        "cell",
        "computing s",
        "exact",
        "gap",
        "plan s",
        "free",
        "gap",
        "plan s",
        "zero-offload",
        "best published",
    )
    remarks = ["Steps are in multiples of computing, which recomputes nothing. A gap is over the certified bound."]
    return render_table("Each cell", header, rows, remarks)


def _columns(one: Planned | None, computing_ns: int) -> tuple[str, str, str]:
    if one is None:
        return "-", "-", "-"
    return f"{one.step_ns / computing_ns:.3f}", f"{100 * one.gap:.1f} %", f"{one.plan_s:.1f}"


def _ratio(step_ns: int | None, computing_ns: int) -> str:
    return "-" if step_ns is None else f"{step_ns / computing_ns:.3f}"


def _median(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _least(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f}" if ratios else "-"


def _sources() -> str:
    lines = []
    for one in MACHINES:
        link, host = one.training_machine.link, one.training_machine
        lines.append(
            f"{one.name}: {one.card_bytes / (1 << 30):.1f} GiB, {one.flops_per_s / 1e12:.0f} TFLOP/s, "
            f"{link.to_device_bytes_per_s / 1e9:.0f} GB/s one way, {link.duplex_bytes_per_s / 1e9:.0f} both ways, "
            f"host {host.host_bytes >> 30} GiB at {host.host_bytes_per_s / 1e9:.0f} GB/s. {one.sources}"
        )
    return "\n".join(lines)
