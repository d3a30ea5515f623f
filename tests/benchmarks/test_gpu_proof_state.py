"""gpu-proof's programs for the training state and for compiled models: what they compare, and what is a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vdnn
from benchmarks.on_a_gpu import compiled_budget, training_state_ways
from benchmarks.on_a_gpu.compiled_budget import Compiled
from benchmarks.on_a_gpu.training_state_ways import ON_CPU, PLAIN, WAYS, Trained

MIB = 2**20


@pytest.fixture(autouse=True)
def algorithms_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are processes of their own, and switch determinism on for good."""
    monkeypatch.setattr(training_state_ways.torch, "use_deterministic_algorithms", lambda mode, **_: None)


@pytest.mark.slow
def test_every_part_of_the_training_state_is_trained_beside_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    assert training_state_ways.main(["--device", "sim", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["way"] for row in rows] == [PLAIN, *WAYS]
    assert all(row["same_bits"] for row in rows if row["way"] != ON_CPU)
    assert "Training state on the host, on sim" in capsys.readouterr().out


def test_a_way_that_raises_hides_no_other_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = vdnn.offload

    def refusing(**options: Any) -> Any:
        if options.get("gradients"):
            raise ValueError("none leave today")
        return offload(**options)

    monkeypatch.setattr(training_state_ways.vdnn, "offload", refusing)
    assert training_state_ways.main(["--device", "sim"]) == 1
    said = capsys.readouterr().out
    assert "optimizer, gradients: ValueError: none leave today" in said
    assert all(way in said for way in WAYS)


def test_other_bits_are_a_failure_and_a_step_on_the_cpu_may_be_near() -> None:
    equal = Trained("optimizer", True, 0.0, 1.0, 64 * MIB, 80 * MIB)
    assert training_state_ways.wrong(equal) == ""
    assert "differ from plain's" in training_state_ways.wrong(replace(equal, same_bits=False, furthest=1e-9))
    near = replace(equal, way=ON_CPU, same_bits=False, furthest=1e-6)
    assert training_state_ways.wrong(near) == ""
    assert "1.0e-02 from plain's" in training_state_ways.wrong(replace(near, furthest=0.01))
    assert "nan from plain's" in training_state_ways.wrong(replace(near, furthest=float("nan")))


def test_a_compiled_step_over_its_budget_or_with_other_gradients_is_a_failure() -> None:
    free = Compiled(None, 100 * MIB, 60 * MIB, None, 1.0, 0.0)
    under = Compiled(70 * MIB, 69 * MIB, 29 * MIB, None, 1.0, 1e-7)
    assert compiled_budget.wrong([free, under]) == []
    over = compiled_budget.wrong([free, replace(under, held_bytes=71 * MIB)])
    assert over == [f"{71 * MIB} bytes are held, of a budget of {70 * MIB}"]
    assert "from those without a budget" in compiled_budget.wrong([free, replace(under, furthest=float("nan"))])[0]


@pytest.mark.full  # it compiles twice
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
def test_a_compiled_model_is_trained_without_a_budget_and_under_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled_budget.main(["--device", "cpu"]) == 0
    assert "A model compiled as a whole, on cpu" in capsys.readouterr().out
