"""The table of one rank of many: its step runs as predicted, under its budget."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.models.llama import LlamaShape
from benchmarks.plans import many_ranks
from benchmarks.plans.many_ranks import RankStep, rank_step, render
from vdnn.planning.least_memory import least_bytes
from vdnn.step.plan import Action

pytestmark = pytest.mark.slow

SMALL = LlamaShape(vocabulary=512, layers=2, width=256, heads=4, shared_heads=2, inner=512)
TOKENS = 4096  # enough that the saved storages are larger than min_bytes


@pytest.fixture(scope="module")
def step() -> RankStep:
    return rank_step(64, SMALL, 1, TOKENS, "h100", "min")


def test_a_rank_runs_as_it_was_predicted_under_its_budget(step: RankStep) -> None:
    budget_bytes = step.planned.plan.budget_bytes
    assert budget_bytes == least_bytes(step.recording) < step.recording.peak_bytes
    assert step.executed.peak_bytes == step.planned.timeline.peak_bytes <= budget_bytes
    assert step.executed.step_ns == step.planned.timeline.step_ns


def test_the_table_says_what_leaves_and_what_is_made_again(step: RankStep) -> None:
    actions = [step.bytes_of(action) for action in Action]
    assert sum(actions) == step.saved_bytes
    assert step.bytes_of(Action.OFFLOAD)
    row = next(line for line in render([step], "").splitlines() if line.startswith("64 "))
    shares = [int(share) for share in re.findall(r", +(\d+)%", row)]
    again = step.bytes_of(Action.RECOMPUTE, Action.COMPRESS)
    assert shares == [round(100 * part / step.saved_bytes) for part in (step.bytes_of(Action.OFFLOAD), again)]


def test_the_command_shows_a_row_for_each_number_of_ranks(
    step: RankStep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []

    def made(ranks: int, *given: object) -> RankStep:
        asked.append((ranks, *given))
        return replace(step, ranks=ranks)

    monkeypatch.setattr(many_ranks, "rank_step", made)
    assert (
        many_ranks.main(["--ranks", "8", "512", "--layers", "2", "--budget", "40GiB", "--hardware", "a100-40gb"]) == 0
    )
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line[:1].isdigit()] == ["8", "512", "2"]
    assert asked == [(ranks, LlamaShape(layers=2), 1, 8192, "a100-40gb", "40GiB") for ranks in (8, 512)]
    assert "2 of 32 layers, 1 x 8192 tokens a rank" in said
