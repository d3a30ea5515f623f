"""Passes of a batch are chosen by their time, and a budget that cannot be met is refused with the ways out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn
from vdnn.bytesize import parse_bytes
from vdnn.cli.main import main
from vdnn.errors import BudgetError
from vdnn.planning.training.least_placement import least_training_bytes
from vdnn.runtime.rehearsal.chosen_passes import fastest_passes, numbers_of_passes
from vdnn.runtime.rehearsal.rehearsal import subject_of
from vdnn.runtime.rehearsal.training_ahead import rehearsed_training, terms_of

CLASSES, WIDTH, TOKENS, BATCH = 20_000, 128, 256, 8
CARD: dict[str, Any] = {"hardware": "rtx-4090", "optimizer": "adamw", "host": "64GiB"}


class Classifier(nn.Module):
    """Most of its memory is the logits of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def classifier(batch: int) -> Any:
    return Classifier(), torch.zeros(batch, TOKENS, dtype=torch.long)


def least(batch: int, *, passes: int = 1, loss_chunks: int = 0) -> int:
    subject = subject_of(classifier, batch)
    rehearsed = rehearsed_training(
        subject,
        terms_of("rtx-4090", host="64GiB", host_speed=1.0),
        name="classifier",
        on_progress=lambda doing: None,
        optimizer="adamw",
        micro_batches=passes,
        loss_chunks=loss_chunks,
    )
    return least_training_bytes(rehearsed.training)


def test_a_budget_that_cannot_be_met_names_both_ways_out_with_what_they_need() -> None:
    budget = least(BATCH // 4, passes=4) + (1 << 20)
    with pytest.raises(BudgetError) as refused:
        vdnn.plan_training(classifier, BATCH, **CARD, budget=budget)
    said = str(refused.value)
    assert refused.value.least_bytes == least(BATCH) > budget
    assert re.search(rf"take 4 micro-batches of {BATCH // 4} \(.* are needed\)", said)
    in_chunks = re.search(r"compute the loss in chunks of the logits, as .* does \((.*) are needed\)\.$", said)
    assert in_chunks is not None
    assert parse_bytes(in_chunks[1].replace(" ", "")) == pytest.approx(least(BATCH, loss_chunks=8), rel=0.01)
    # and both hold
    vdnn.plan_training(classifier, BATCH // 4, **CARD, budget=budget, micro_batches=4)
    assert least(BATCH, loss_chunks=8) < 0.5 * least(BATCH)


def test_a_model_without_logits_is_not_offered_another_loss() -> None:
    def build(batch: int) -> Any:
        return nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)), torch.zeros(batch, 64)

    with pytest.raises(BudgetError, match="Raise the budget to .*, or take 8 micro-batches of 512 ") as refused:
        vdnn.plan_training(build, 4096, **CARD, budget="32MiB")
    assert "chunks" not in str(refused.value)


def test_passes_are_chosen_by_the_time_of_their_step() -> None:
    budget = least(BATCH // 2, passes=2) * 11 // 10
    report = vdnn.plan_training(classifier, BATCH, **CARD, budget=budget, micro_batches="auto")
    passes = report.micro_batches
    assert passes > 1
    assert report.batch == BATCH // passes
    (note,) = [one for one in report.notes if "in passes" in one]
    assert note.startswith("a batch of 8 in passes: 1 x 8: does not fit, 2 x 4: ")
    times = {int(passes): float(ms) for passes, ms in re.findall(r"(\d) x \d: ([\d.]+) ms", note)}
    assert min(times, key=lambda number: times[number]) == passes
    assert report.bound_ns is not None
    alone = vdnn.plan_training(classifier, BATCH // passes, **CARD, budget=budget, micro_batches=passes)
    assert alone.step_ns == report.step_ns


def test_with_room_one_pass_is_the_fastest() -> None:
    report = vdnn.plan_training(classifier, BATCH, **CARD, micro_batches="auto")
    assert (report.batch, report.micro_batches) == (BATCH, 1)


def test_the_search_ends_behind_two_numbers_of_passes_that_are_slower() -> None:
    some = vdnn.plan_training(classifier, 1, **CARD)
    asked: list[int] = []

    def planned(size: int, passes: int) -> vdnn.TrainingReport:
        asked.append(passes)
        return some

    report = fastest_passes(24, planned, planned)
    assert numbers_of_passes(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert asked == [1, 2, 3, 1]
    assert "more than 3 passes were not tried" in report.notes[-1]


def test_no_number_of_passes_fits() -> None:
    with pytest.raises(BudgetError, match="cannot be met"):
        vdnn.plan_training(classifier, BATCH, **CARD, budget="1MiB", micro_batches="auto")


@pytest.mark.parametrize(
    ("model", "batch", "micro_batches", "said"),
    [
        (classifier, BATCH, "some", "micro_batches: expected a number or 'auto', got 'some'"),
        (classifier, (torch.zeros(2, TOKENS, dtype=torch.long),), "auto", "expected a function of the batch"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: Callable[[int], Any], batch: Any, micro_batches: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        vdnn.plan_training(model, batch, **CARD, micro_batches=micro_batches)


def test_the_command_chooses_and_names_ways_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "classified.py"
    path.write_text("from tests.runtime.rehearsal.test_ways_out import classifier as build\n")
    common = [f"{path}:build", "--batch", str(BATCH), "--optimizer", "adamw", "--hardware", "rtx-4090", "--no-bound"]
    budget = str(least(BATCH // 4, passes=4) + (1 << 20))
    assert main(["plan", *common, "--training", "--budget", budget]) == 1
    assert "take 4 micro-batches of 2 (" in capsys.readouterr().err
    assert main(["plan", *common, "--micro-batches", "auto", "--budget", budget]) == 0
    assert "a batch of 8 in passes: 1 x 8: does not fit, " in capsys.readouterr().out
    assert main(["plan", *common, "--micro-batches", "auto", "--largest-batch"]) == 2
    assert "--micro-batches auto and --largest-batch: expected one of them" in capsys.readouterr().err
