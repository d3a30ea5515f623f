"""`make demo` in a small size: results are equal bit for bit, the budget holds, files are whole, failures are found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import vdnn
from benchmarks.demo import __main__ as demo
from benchmarks.demo.devices import CudaDevice, VirtualDevice
from benchmarks.demo.results import PAGE, PICTURE, RUN, written_whole
from benchmarks.demo.training import GPU_SIZE, SideBySide, Size, TrainingRun, text_of, train_side_by_side
from benchmarks.demo.wording import training_text, verdict
from benchmarks.models import vgg16
from vdnn.report import read_run
from vdnn.report.plan_report import PlanReport
from vdnn.step.plan import Action

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib", reason="the demo draws: pip install 'vdnn[report]'")
SMALL = Size(layers=2, width=32, heads=2, tokens=64, batch=16, steps=4)


@pytest.fixture(scope="module")
def trained() -> SideBySide:
    return train_side_by_side(VirtualDevice, SMALL)


@pytest.fixture(scope="module")
def planned() -> PlanReport:
    return vdnn.plan(vgg16, 2, hardware="titan-x", budget="min")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, trained: SideBySide, planned: PlanReport) -> pytest.MonkeyPatch:
    """Replaces training and planning by their finished results."""
    monkeypatch.setattr(demo, "train_side_by_side", lambda *arguments: trained)
    monkeypatch.setattr(demo.vdnn, "plan", lambda *arguments, **options: planned)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    return monkeypatch


def changed(run: TrainingRun, name: str, value: float) -> TrainingRun:
    """Returns the run with one element of one tensor changed."""
    tensor = run.tensors[name].clone()
    tensor.view(-1)[0] = value
    return dataclasses.replace(run, tensors={**run.tensors, name: tensor})


def test_losses_weights_and_gradients_under_the_budget_are_those_of_plain_torch(trained: SideBySide) -> None:
    assert trained.different_steps == ()
    assert trained.different_tensors == ()
    parameters = [name for name in trained.plain.tensors if not name.startswith("gradient of ")]
    assert len(trained.plain.tensors) == 2 * len(parameters), "each parameter has a gradient"
    assert trained.is_finite
    assert trained.plain.losses[-1] < trained.plain.losses[0], "it learns"
    assert trained.is_right


def test_the_budget_holds_from_the_first_step_that_follows_the_plan(trained: SideBySide) -> None:
    assert trained.planned_from == 1
    assert trained.budget_bytes == trained.plain_peak_bytes // 2
    assert 0 < trained.planned_peak_bytes <= trained.budget_bytes
    assert trained.step.plan is not None
    assert any(one.action is not Action.KEEP for one in trained.step.plan.lifetimes)


def test_a_loss_that_differs_in_one_bit_is_found(trained: SideBySide) -> None:
    first, *others = trained.ours.losses
    ours = dataclasses.replace(trained.ours, losses=(first * (1 + 2**-52), *others))
    wrong = dataclasses.replace(trained, ours=ours)
    assert not wrong.is_right
    assert f"losses      WRONG: {SMALL.steps - 1} of {SMALL.steps} equal" in verdict(wrong)
    assert " NO " in training_text(wrong)
    assert " NO " not in training_text(trained)


def test_a_gradient_that_differs_in_its_sign_of_zero_is_found(trained: SideBySide) -> None:
    name = "gradient of norm.bias"
    zero = changed(trained.plain, name, 0.0)
    wrong = dataclasses.replace(trained, plain=zero, ours=changed(trained.ours, name, -0.0))
    assert wrong.different_tensors == (name,)
    assert not wrong.is_right
    assert "weights     WRONG" in verdict(wrong)


def test_nan_on_both_sides_is_no_success(trained: SideBySide) -> None:
    nan = float("nan")
    wrong = dataclasses.replace(
        trained, plain=changed(trained.plain, "norm.bias", nan), ours=changed(trained.ours, "norm.bias", nan)
    )
    assert not wrong.different_tensors
    assert not wrong.is_right
    assert "numbers     WRONG" in verdict(wrong)


def test_a_step_over_its_budget_and_a_plan_that_nobody_follows_are_found(trained: SideBySide) -> None:
    over = dataclasses.replace(trained, budget_bytes=trained.planned_peak_bytes - 1)
    unplanned = dataclasses.replace(trained, planned_from=SMALL.steps)
    assert not over.is_right
    assert not unplanned.is_right
    assert "memory      WRONG" in verdict(over)


def test_it_leaves_a_page_a_picture_and_a_run(
    shown: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder" / "demo"
    assert demo.main(["--folder", str(folder)]) == 0
    assert sorted(entry.name for entry in folder.iterdir()) == [PICTURE, PAGE, RUN]
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    page = (folder / PAGE).read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.endswith("</html>\n")
    assert {step.name for step in read_run(folder / RUN).steps} >= {"gpt"}
    assert {cell.peer for cell in read_run(folder / RUN).cells} == {"plain", "vdnn-auto"}
    said = capsys.readouterr().out
    assert f"losses      right: {SMALL.steps} of {SMALL.steps} equal bit for bit" in said
    assert "vgg16, batch 2, on titan-x" in said
    assert all(str(folder / name) in said for name in (PAGE, PICTURE))
    assert [entry.name for entry in folder.parent.iterdir()] == ["demo"]


def test_the_exit_code_says_that_something_differed(
    shown: pytest.MonkeyPatch, tmp_path: Path, trained: SideBySide
) -> None:
    wrong = dataclasses.replace(trained, budget_bytes=1)
    shown.setattr(demo, "train_side_by_side", lambda *arguments: wrong)
    shown.setattr(demo, "write_results", lambda *arguments: None)
    assert demo.main(["--folder", str(tmp_path)]) == 1


def test_an_interrupted_run_leaves_what_was_there(
    shown: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*arguments: Any, **options: Any) -> PlanReport:
        raise KeyboardInterrupt

    shown.setattr(demo.vdnn, "plan", stopped)
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / PAGE).write_text("of an earlier time")
    for folder in (earlier, tmp_path / "new"):
        assert demo.main(["--folder", str(folder)]) == demo.INTERRUPTED
        assert "interrupted" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["earlier"]
    assert [entry.read_text() for entry in earlier.iterdir()] == ["of an earlier time"]


def test_results_replace_those_of_an_earlier_time_and_nothing_else(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with written_whole(tmp_path / "demo") as unfinished:
            (unfinished / "run").mkdir()
            (unfinished / "run" / text).write_text(text)
            (unfinished / "page").write_text(text)
        (tmp_path / "demo" / "mine").touch()
    found = {path.name for path in (tmp_path / "demo").rglob("*")}
    assert found == {"run", "second", "page", "mine"}
    assert (tmp_path / "demo" / "page").read_text() == "second"


def test_with_a_gpu_the_same_runs_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = []
    monkeypatch.setattr(demo, "show", lambda folder, device, size: called.append((device, size)) or 0)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: True)
    assert demo.main(["--folder", str(tmp_path)]) == 0
    assert demo.main(["--folder", str(tmp_path), "--no-gpu"]) == 0
    assert called == [(CudaDevice, GPU_SIZE), (VirtualDevice, demo.CPU_SIZE)]


def test_the_text_is_read_in_order_of_its_pages(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "a.md").write_text("one ")
    assert bytes(text_of(tmp_path).tolist()) == b"one two"
    assert text_of(tmp_path).dtype is torch.uint8
