"""Runs sessions of one decoder that manage its training state: the tables of docs/training-state.md.

    python -m benchmarks.whole_state.what_stays

A decoder of 100 million parameters, 8 blocks of width 1,024 with AdamW, on 4 x 1,024 tokens, without data on a virtual
RTX 4090. A row is the last step of a session under a budget, a share of the peak with everything on the device. "As
decided": what makes the step shortest stays on the device; otherwise all that is managed leaves in each step.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import vdnn
from benchmarks.text_table import render_table
from benchmarks.whole_state.sessions import Made, Ran, blocks, plain, ran

RESULTS = Path(__file__).parent.parent / "results" / "what_stays.txt"
MACHINE = "rtx-4090"
STATE_ALONE, EVERYTHING = {"gradients": False}, {"parameters": "all"}
STATE_BUDGETS = (0.9, 0.6, 0.35, 0.3)
ALL_BUDGETS = (0.9, 0.6, 0.45, 0.35, 0.28)
NEED_BUDGETS = (0.75, 0.35, 0.3, 0.28, 0.2, 0.15)
PLAN_BUDGETS = (0.6, 0.35, 0.28)


def make() -> Made:
    return blocks(1024, 8), torch.ones(4, 1024, 1024)


def build(batch: int) -> Made:
    return blocks(1024, 8), torch.ones(batch, 1024, 1024)


def took(one: Ran, budget: int) -> str:
    if one.refused:
        return "refused"
    over = one.peak_bytes / budget - 1
    return f"{one.step_ns / 1e6:.1f} ms" + (f", {over:.1%} over" if over > 0 else "")


def decided_rows(peak_bytes: int, shares: tuple[float, ...], options: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for share in shares:
        budget = int(share * peak_bytes)
        away, decided = (ran(make, MACHINE, budget, decides=decides, **options) for decides in (False, True))
        predicted = f"{decided.predicted_ns / 1e6:.1f} ms" if decided.predicted_ns else ""
        rows.append((f"{share:.0%}", took(away, budget), took(decided, budget), predicted, decided.stays))
    return rows


def grown_rows(peak_bytes: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for share in NEED_BUDGETS:
        budget = int(share * peak_bytes)
        alone, grown = (ran(make, MACHINE, budget, **options) for options in (STATE_ALONE, {}))
        rows.append((f"{share:.0%}", took(alone, budget), took(grown, budget), grown.extent))
    return rows


def followed_rows(peak_bytes: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for share in PLAN_BUDGETS:
        budget = int(share * peak_bytes)
        report = vdnn.plan_training(build, 4, hardware=MACHINE, budget=budget, optimizer="adamw")
        followed = ran(make, MACHINE, budget, plan=report.plan)
        rows.append((f"{share:.0%}", f"{report.step_ns / 1e6:.1f} ms", took(followed, budget)))
    return rows


def main() -> int:
    warnings.simplefilter("ignore")
    plain_ns, peak_bytes = plain(make, MACHINE)
    decided = ("budget", "all of it leaves", "as decided", "predicted", "stays on the device")
    tables = (
        f"A decoder with everything on the device: {plain_ns / 1e6:.1f} ms, {peak_bytes / (1 << 20):,.0f} MiB",
        render_table("The state may leave", decided, decided_rows(peak_bytes, STATE_BUDGETS, STATE_ALONE)),
        render_table("parameters='all'", decided, decided_rows(peak_bytes, ALL_BUDGETS, EVERYTHING)),
        render_table(
            "As the budget needs", ("budget", "gradients=False", "by itself", "managed"), grown_rows(peak_bytes)
        ),
        render_table(
            "A plan of the whole training",
            ("budget", "the plan", "a session that follows it"),
            followed_rows(peak_bytes),
        ),
    )
    text = "\n\n".join(tables)
    print(text)
    RESULTS.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
