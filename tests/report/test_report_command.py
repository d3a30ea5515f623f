"""`vdnn report`, `vdnn plan --save` and session.save: the files that they write, and the input that they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vdnn
from tests.report.steps import BUDGETS, reports, saved_run
from tests.report.trace_parser import parse
from tests.runtime.rigs.virtual_training import trained_virtually
from vdnn.cli.main import main
from vdnn.report.run_folder import read_run
from vdnn.report.saved_plan import save_plan_reports

PLAN = (
    "plan",
    "tests.report.steps:network",
    "--batch",
    "16",
    "--hardware",
    "titan-x",
    "--min-bytes",
    "0",
    "--no-bound",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saved_run(tmp_path / "run")
    return tmp_path / "run"


def test_alone_it_prints_a_summary(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("With vdnn, network (batch 16) trains ")
    assert "of the memory of plain PyTorch" in said.splitlines()[0]
    assert "step times: exactly as predicted in all 2 rows" in said


@pytest.mark.slow
def test_several_kinds_are_written_at_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page, trace, figures = tmp_path / "page.html", tmp_path / "trace.json", tmp_path / "figures"
    code = main(["report", str(run), "--html", str(page), "--trace", str(trace), "--figures", str(figures)])
    assert code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert len(parse(trace.read_text())) == 2 * len(BUDGETS)
    assert {path.suffix for path in figures.iterdir()} == {".png", ".svg"}
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"wrote {trace}",
        f"wrote {page}",
        f"wrote {figures}",
    ]


def test_what_is_no_run_is_refused_with_what_was_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "expected a folder with cells.jsonl or steps/" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["--html", "--trace"])
def test_a_folder_that_is_not_there_is_named(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), kind, str(tmp_path / "no" / "file")]) == 2
    assert f"the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "is_folder", "sentence"),
    [
        ("--html", True, "expected a file to write, got a folder"),
        ("--trace", True, "expected a file to write, got a folder"),
        ("--figures", False, "expected a folder for --figures, got a file"),
    ],
)
def test_a_file_for_a_folder_is_refused(
    option: str, is_folder: bool, sentence: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir() if is_folder else place.touch()
    assert main(["report", str(run), option, str(place)]) == 2
    assert capsys.readouterr().err == f"vdnn report: {place}: {sentence}.\n"


def test_a_session_saves_what_a_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = trained_virtually("resnet", budget="90%")
    session.save(tmp_path / "run", "resnet")
    (step,) = read_run(tmp_path / "run").steps
    assert (step.recording, step.plan, step.measured) == (session.recording, session.plan, session.timeline)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("With vdnn, resnet trains ")


def test_a_session_that_measured_nothing_is_an_empty_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with vdnn.offload(device="sim", min_bytes=0) as session:
        torch.nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
    session.save(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "This run has no measured or predicted step" in capsys.readouterr().out


@pytest.mark.slow
def test_plans_of_several_budgets_are_gathered_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for budget in ("min", "20MiB"):
        assert main([*PLAN, "--budget", budget, "--explain", "2", "--save", str(run)]) == 0
    found = read_run(run)
    assert [(cell.peer, cell.budget) for cell in found.cells] == [
        ("vdnn-auto", "min"),
        ("plain", None),
        ("vdnn-auto", "20MiB"),
    ]
    assert [step.name for step in found.steps] == ["network-16-titan-x-auto-20MiB", "network-16-titan-x-auto-min"]
    reasons = found.steps[0].reasons
    assert reasons is not None
    assert len(reasons.storages) == 2
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert "network, batch 16 on virtual titan-x" in capsys.readouterr().out


def test_a_step_that_does_not_fit_plain_is_said_to_run_out_of_memory(tmp_path: Path) -> None:
    report = reports()[-1]
    peak_bytes = report.planned.recording.peak_bytes
    save_plan_reports(tmp_path, [report], budget="50%", card_bytes=peak_bytes - 1)
    (plain,) = (cell for cell in read_run(tmp_path).cells if cell.is_plain)
    assert plain.status == "out-of-memory"
    assert plain.said == f"needs {vdnn.format_bytes(peak_bytes)} of {vdnn.format_bytes(peak_bytes - 1)}"
    save_plan_reports(tmp_path, [report], budget="50%", card_bytes=peak_bytes)
    assert {cell.status for cell in read_run(tmp_path).cells} == {"ok"}
