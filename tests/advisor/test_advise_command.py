"""`vdnn advise` takes a loop or a function of a batch size, prints text or JSON, and explains errors in a sentence."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from vdnn import Advices
from vdnn.advisor.advice import Kind
from vdnn.advisor.examination import EXAMINERS
from vdnn.cli.main import main

HERE = "tests.advisor.my_training"


@pytest.fixture(scope="module")
def said_of_a_loop() -> str:
    """The output of one run, as JSON."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        assert main(["advise", f"{HERE}:loop", "--hardware", "h100", "--json"]) == 0
    return written.getvalue()


def test_a_loop_is_watched_and_rehearsed(said_of_a_loop: str) -> None:
    advices = Advices.from_json(said_of_a_loop)
    assert (advices.name, advices.batch, advices.hardware) == (f"{HERE}:loop", 16, "h100")
    assert (advices.real_steps, advices.device) == (3, "cpu")
    assert len(advices.of(Kind.OPTIMIZER_FORM)) == 1
    assert set(advices.examined) | {one.kind for one in advices.not_examined} == set(EXAMINERS) == set(Kind)


def test_the_json_says_what_it_is_and_is_read_back(said_of_a_loop: str) -> None:
    shown = json.loads(said_of_a_loop)
    assert (shown["form"], shown["version"]) == ("vdnn advice", 1)
    read = Advices.from_json(said_of_a_loop)
    assert Advices.from_json(read.as_json()) == read


def test_the_text_has_each_advice_with_what_to_do_and_what_it_gains(said_of_a_loop: str) -> None:
    advices = Advices.from_json(said_of_a_loop)
    text = str(advices)
    for advice in advices:
        assert advice.seen in text
        assert f"do:   {advice.action}" in text
        assert f"gain: {advice.gain}" in text
    assert "examined without a finding: mixed precision" in text
    assert "not examined: gradients filled with zeros: the advisor clears gradients itself" in text
    assert [advice.rank for advice in advices] == sorted(advice.rank for advice in advices)


@pytest.mark.slow
def test_a_step_of_ones_own_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", f"{HERE}:with_step", "--hardware", "titan-x", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert ".item() at tests/advisor/my_training.py:" in said
    assert "1 real steps on cpu" in said


@pytest.mark.slow
def test_a_function_of_a_batch_size_runs_no_real_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", f"{HERE}:workload", "--batch", "8", "--optimizer", "adamw", "--hardware", "h100"]
    assert main([*arguments, "--budget", "1GiB"]) == 0
    captured = capsys.readouterr()
    assert "batch 8, on h100: a step takes" in captured.out
    assert "of 1.00 GiB (predicted)" in captured.out
    assert "real steps" not in captured.out
    assert "fused optimizer: AdamW updates 8 parameters" in captured.out
    assert captured.err == "", "progress is for terminals"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_module:f"], "no_such_module"),
        ([f"{HERE}:no_such"], "has no 'no_such'"),
        (["nonsense"], "expected"),
        ([f"{HERE}:no_parts"], "must return (model, loader, optimizer)"),
        ([f"{HERE}:workload", "--batch", "0"], "--batch: expected a number, 1 or more, got 0."),
        ([f"{HERE}:loop", "--optimizer", "sgd"], "--optimizer: expected together with --batch only"),
        ([f"{HERE}:loop", "--steps", "-1"], "steps: expected a number of steps, 0 or more, got -1."),
        ([f"{HERE}:loop", "--hardware", "abacus"], "hardware profile: expected one of"),
        ([f"{HERE}:loop", "--hardware", "h100", "--budget", "min"], 'got "min"'),
        ([f"{HERE}:empty", "--hardware", "h100"], "loader: expected at least one batch, got none."),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vdnn advise: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "doing", "is_in_the_program"),
    [
        ("of_other_widths", "running a step failed: RuntimeError: mat1 and mat2", False),
        ("with_a_loader_that_fails", "taking a batch of the loader failed: KeyError: 'label'", True),
        ("with_a_loader_that_cannot_begin", "taking a batch of the loader failed: FileNotFoundError", True),
    ],
)
def test_what_a_real_step_raises_is_said_in_a_sentence(
    function: str, doing: str, is_in_the_program: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", f"{HERE}:{function}", "--hardware", "h100"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"vdnn advise: {doing}")
    assert ("my_training.py:" in captured.err) is is_in_the_program
    assert "it fails without vdnn too." in captured.err
    assert "Traceback" not in captured.err


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", f"{HERE}:interrupted"]) == 130
    assert capsys.readouterr().err.endswith("vdnn advise: interrupted\n")
