"""What `make gpu-proof` makes of the training steps that benchmarks.gpu_steps measured.

Reads the rows as they stand in the results. Imports nothing, so that a broken installation can be told from a broken
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Allocated bytes are rounded up, requested ones are not: a budget speaks of these.
ROUNDING = 1.005


def faults_of_steps(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must not be: vdnn fails, changes a gradient that plain PyTorch repeats, or goes over its budget. That
    others fail is theirs.
    """
    problems = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["way"]: row for row in rows if row["model"] == model}
        plain = own.get("plain")
        if plain is None or plain["said"]:
            problems.append(f"{model}: plain: {'not there' if plain is None else plain['said']}")
            continue
        for way, row in own.items():
            if not way.startswith("vdnn"):
                continue
            problems += [f"{model}: {way}: {fault}" for fault in _faults(row, plain)]
    return problems


def _faults(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    if row["said"]:
        return [row["said"]]
    faults = []
    if plain["identical"] and not row["identical"]:
        faults.append(f"gradients differ from the plain step's by up to {row['max_difference']:.1e}")
    budget_bytes = row["budget_bytes"]
    if budget_bytes is not None and row["peak_bytes"] > budget_bytes * ROUNDING:
        faults.append(f"expected a peak within the budget of {budget_bytes} bytes, got {row['peak_bytes']}")
    return faults


def steps_headline(rows: Sequence[dict[str, Any]]) -> str:
    ran = [row for row in rows if not row["said"]]
    same = sum(bool(row["identical"]) for row in ran)
    models = len({row["model"] for row in rows})
    return f"{len(ran)} of {len(rows)} ways of {models} models ran, gradients identical in {same}"
