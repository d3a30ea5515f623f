"""The benchmark that draws models of public libraries: its draw, its rows, and what is stored of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.drawn_models import __main__ as drawn_models
from benchmarks.drawn_models.planned_model import FAILED, NO_ANSWER, NOT_IN_TORCH, PLANNED, planned_row

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def layers(batch: int) -> Any:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU()))), torch.randn(
        1024 * batch, 1024
    )


def unmakable(batch: int) -> Any:
    raise TypeError("the default configuration lacks a size")


class Unstable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such mask")


def unstable(batch: int) -> Any:
    return Unstable(), torch.randn(batch, 4)


def slow(batch: int) -> Any:
    while True:
        torch.ones(1)


def waiting(batch: int) -> Any:
    time.sleep(600)


def test_a_drawn_model_runs_as_it_was_planned() -> None:
    row = planned_row("layers", layers, 4, 120)
    assert row["outcome"] == PLANNED, row
    assert row["least_bytes"] < row["budget_bytes"] < row["kept_bytes"]
    assert row["run_bytes"] <= row["budget_bytes"]
    assert drawn_models.runs_as_predicted(row)


def test_what_is_not_planned_says_why() -> None:
    assert planned_row("unmakable", unmakable, 1, 120)["outcome"] == NOT_IN_TORCH
    failed = planned_row("unstable", unstable, 1, 120)
    assert failed["outcome"] == FAILED
    assert "no such mask" in failed["error"]
    assert planned_row("slow", slow, 1, 1)["outcome"] == NO_ANSWER
    assert planned_row("waiting", waiting, 1, 0.05)["outcome"] == NO_ANSWER


def test_the_share_leaves_out_what_torch_cannot_make() -> None:
    rows = [
        {"name": "timm/a", "outcome": NO_ANSWER, "error": "no answer in 3 s"},
        {"name": "timm/b", "outcome": NOT_IN_TORCH, "error": "TypeError"},
    ]
    said = drawn_models.table(rows)
    assert "0 of 1 planned, 0.0%" in said
    assert "timm/b: cannot be made in torch: TypeError" in said


def test_a_seed_draws_the_same_models_again() -> None:
    pytest.importorskip("transformers")
    counts = {"transformers": 100, "peft": 10}
    names = list(drawn_models.drawn(counts, drawn_models.SEED))
    assert len(names) == 110
    assert names == list(drawn_models.drawn(counts, drawn_models.SEED))
    assert names != list(drawn_models.drawn(counts, drawn_models.SEED + 1))
    assert any(name.startswith("peft/") for name in names[:12]), "a run that is stopped has some of each library"


def test_stored_rows_ran_as_predicted_and_their_table_is_that_of_the_rows() -> None:
    rows = [json.loads(line) for line in (RESULTS / "drawn_models.jsonl").read_text().splitlines()]
    planned = [row for row in rows if row["outcome"] == PLANNED]
    assert planned
    assert [row["name"] for row in planned if not drawn_models.runs_as_predicted(row)] == []
    assert (RESULTS / "drawn_models.txt").read_text() == drawn_models.table(rows) + "\n"
