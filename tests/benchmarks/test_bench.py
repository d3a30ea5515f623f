"""`make bench` chooses its programs by the hardware. Tests cover its output with a made-up GPU run and without a
GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench


def cell(peer: str, peak_bytes: int, step_ns: int, **changes: Any) -> dict[str, Any]:
    usual = {"format": 1, "workload": "resnet50", "batch": 8, "place": "cuda", "device": "a card", "clock": "device"}
    return {**usual, "peer": peer, "status": "ok", "said": "", "peak_bytes": peak_bytes, "step_ns": step_ns, **changes}


def test_a_gpus_run_ends_with_claims_pictures_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []

    def sweep(arguments: list[str]) -> int:
        given.extend(arguments)
        run = Path(arguments[arguments.index("--out") + 1])
        run.mkdir(parents=True)
        cells = [cell("plain", 100 << 20, 1000000), cell("vdnn-auto", 60 << 20, 1020000, budget="60%")]
        (run / "cells.jsonl").write_text("".join(json.dumps(one) + "\n" for one in cells))
        return 0

    monkeypatch.setattr(bench.sweep, "main", sweep)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    assert bench.main(["--folder", str(tmp_path)]) == 0
    assert given[given.index("--place") + 1] == "cuda"
    said = capsys.readouterr().out
    assert "held       a third less memory at 3 % or less: resnet50 60% at +2.0%" in said
    assert said.rstrip().splitlines()[-1] == (
        "With vdnn, resnet50 (batch 8) trains with 60 % of the memory of plain PyTorch, "
        "and a step takes 2.0 % longer (a card)."
    )
    assert list((tmp_path / "figures").glob("*.png"))
    assert (tmp_path / "figures" / "report.html").is_file()


def test_a_sweep_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench.sweep, "main", lambda arguments: 130)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    assert bench.main(["--folder", str(tmp_path)]) == 130


def test_without_a_gpu_it_trains_for_real_and_computes_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both programs have their own tests."""
    called = []
    monkeypatch.setattr(bench.vgg16_steps, "main", lambda arguments: called.append(arguments) or 0)
    monkeypatch.setattr(bench.reproduction, "main", lambda arguments: called.append(arguments) or 0)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    assert bench.main(["--folder", str(tmp_path)]) == 0
    assert called == [
        ["--picture", str(tmp_path / "vgg16_steps.png")],
        ["--json", str(tmp_path / "reproduction.jsonl")],
    ]
