"""The benchmark of hooks under plans that recompute, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.core import recomputed_models
from benchmarks.core.recomputed_models import Model, Timed, main
from benchmarks.models.gpt import GptShape, gpt

_SMALL = GptShape(vocabulary=64, tokens=16, layers=2, width=48, heads=4)
_LARGE = GptShape(vocabulary=64, tokens=512, layers=2, width=512, heads=4)


@pytest.mark.slow
def test_the_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda: gpt(8, 512, _LARGE), lambda: gpt(2, 16, _SMALL))
    monkeypatch.setattr(recomputed_models, "models", lambda: {"a small GPT": model})
    monkeypatch.setattr(recomputed_models, "_TIMED", 1)
    path = tmp_path / "figures.json"
    assert main(["--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["budget_share"] for row in rows] == [0.75, 0.55]
    assert all(row["settled_us"] > 0 for row in rows)
    assert any(row["recomputed"] for row in rows)


def test_a_model_of_another_structure_is_refused() -> None:
    whole, small = (
        recomputed_models.recorded(lambda: gpt(2, 16, shape))  # noqa: B023  # called at once
        for shape in (_SMALL, GptShape(vocabulary=64, tokens=16, layers=1, width=48, heads=4))
    )
    with pytest.raises(RuntimeError, match="expected a small model with the saves and uses"):
        recomputed_models.small_plan(whole, small, 0.75)


def test_a_timed_hook_counts_as_the_hook_itself() -> None:
    clock = recomputed_models.Clock()
    hook = Timed(abs, clock)
    assert hook == abs
    assert (hook != abs) is False
    assert hook(-3) == 3
    assert clock.taken_ns > 0
