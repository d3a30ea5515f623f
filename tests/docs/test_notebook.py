"""The stored notebook runs, and its stored outputs are reproduced: its times are virtual, so every figure is the same
on every machine.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.notebook_cells import code_cells, outputs_of

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib", reason="the notebook draws: pip install 'vdnn[report]'")
pytest.importorskip("scipy", reason="the notebook shows certificates: pip install 'vdnn[plan]'")
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "plan_without_a_gpu.ipynb"
# Text that depends on the planning machine, not on the card.
OURS = re.compile(r"planned in [\d.]+ s|(?<=torch: ).*|(?<=vdnn: ).*")


def figures_in(outputs: list[dict[str, Any]]) -> list[str]:
    lines = [line.rstrip() for output in outputs for line in output.get("text", [])]
    return [OURS.sub("", line) for line in lines]


def sizes_in(outputs: list[dict[str, Any]]) -> list[bytes]:
    """Width and height of each picture, as stored in its PNG. Pixels of letters depend on the matplotlib version."""
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture)[16:24] for picture in pictures]


@pytest.mark.slow
def test_the_notebook_shows_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads(NOTEBOOK.read_text())
    stored = [cell["outputs"] for cell in code_cells(notebook)]
    found = outputs_of(notebook, tmp_path)
    assert sum(len(figures_in(outputs)) for outputs in stored) > 20
    assert [figures_in(outputs) for outputs in found] == [figures_in(outputs) for outputs in stored]
    assert sum(len(sizes_in(outputs)) for outputs in stored) == 3
    assert [sizes_in(outputs) for outputs in found] == [sizes_in(outputs) for outputs in stored]


def test_a_cell_shows_what_a_notebook_would_show(tmp_path: Path) -> None:
    sources = [
        "x = 1\nprint(x)\nx + 1",
        "open('here', 'w').close()",
        "class P:\n  def _repr_png_(self): return b'p'\nP()",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": [source]} for source in sources]}
    first, second, third = outputs_of(notebook, tmp_path)
    assert [one["output_type"] for one in first] == ["stream", "execute_result"]
    assert (first[0]["text"], first[1]["data"]) == (["1\n"], {"text/plain": ["2"]})
    assert second == []
    assert (tmp_path / "here").exists()
    assert base64.b64decode(third[0]["data"]["image/png"]) == b"p"


def test_a_figure_that_changed_is_found() -> None:
    def stored(text: str) -> list[dict[str, Any]]:
        return [{"output_type": "stream", "text": [text]}]

    assert figures_in(stored("peak 1 GiB; planned in 0.51 s\n")) == figures_in(stored("peak 1 GiB; planned in 9 s\n"))
    assert figures_in(stored("peak 1 GiB; planned in 0.51 s\n")) != figures_in(
        stored("peak 2 GiB; planned in 0.51 s\n")
    )
