"""What counts as a failure of the training steps of `make gpu-proof`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.step_verdict import faults_of_steps, steps_headline


def row(way: str, **changes: Any) -> dict[str, Any]:
    usual = {"model": "net", "said": "", "peak_bytes": 100, "budget_bytes": None, "identical": True}
    return {"way": way, "max_difference": 0.0, **usual, **changes}


PLAIN = row("plain")


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        ([], []),
        ([PLAIN, row("vdnn-all")], []),
        ([row("vdnn-all")], ["net: plain: not there"]),
        ([row("plain", said="OutOfMemoryError: full"), row("vdnn-all")], ["net: plain: OutOfMemoryError: full"]),
        ([PLAIN, row("vdnn-all", said="no")], ["net: vdnn-all: no"]),
        ([PLAIN, row("save_on_cpu, pinned", said="no")], []),
        ([PLAIN, row("block checkpointing", identical=False)], []),
        (
            [PLAIN, row("vdnn-all", identical=False, max_difference=0.25)],
            ["net: vdnn-all: gradients differ from the plain step's by up to 2.5e-01"],
        ),
        ([row("plain", identical=False), row("vdnn-all", identical=False)], []),
        ([PLAIN, row("vdnn, budget 60%", budget_bytes=100)], []),
        (
            [PLAIN, row("vdnn, budget 60%", budget_bytes=99)],
            ["net: vdnn, budget 60%: expected a peak within the budget of 99 bytes, got 100"],
        ),
    ],
)
def test_vdnn_must_run_repeat_the_gradients_and_stay_in_its_budget(
    rows: list[dict[str, Any]], faults: list[str]
) -> None:
    assert faults_of_steps(rows) == faults


def test_each_model_is_compared_with_its_own_plain_step() -> None:
    other = {"model": "other"}
    rows = [row("plain", identical=False), row("vdnn-all", identical=False), row("plain", **other)]
    assert faults_of_steps([*rows, row("vdnn-all", identical=False, **other)]) == [
        "other: vdnn-all: gradients differ from the plain step's by up to 0.0e+00"
    ]


def test_the_headline_counts() -> None:
    rows = [PLAIN, row("vdnn-all", identical=False), row("vdnn-conv", said="no")]
    assert steps_headline(rows) == "2 of 3 ways of 1 models ran, gradients identical in 1"
