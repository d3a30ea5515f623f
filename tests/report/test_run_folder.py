"""Reading a run: complete lines are read, an incomplete one is ignored, and errors name the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.steps import BUDGETS, saved_run, tightest
from vdnn.errors import FormatError, InvalidArgumentError
from vdnn.report.cell import Cell, cell_as_json
from vdnn.report.comparison import cells_of_run, comparisons
from vdnn.report.run_folder import append_cells, read_run
from vdnn.step.saved_step import SavedStep

PLAIN: dict[str, Any] = {"format": 1, "workload": "net", "peer": "plain", "status": "ok"}


def write(folder: Path, *lines: object, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "cells.jsonl").write_text(text + end)
    return folder


def test_a_cell_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    cell = Cell(
        "net",
        "vdnn-auto",
        batch=4,
        budget="60%",
        place="virtual",
        clock="virtual",
        step_ns=7,
        step_times_ns=(6, 7, 9),
        identical=True,
        versions={"torch": "2"},
    )
    append_cells(tmp_path / "run", [cell, replace(cell, budget="40%")])
    assert read_run(tmp_path / "run").cells == (cell, replace(cell, budget="40%"))


def test_fields_that_nobody_knows_are_ignored_and_those_that_do_not_apply_are_none(tmp_path: Path) -> None:
    (cell,) = read_run(write(tmp_path, {**PLAIN, "weather": "fine", "peak_bytes": None, "said": ""})).cells
    assert cell == Cell("net", "plain")


def test_a_median_between_two_is_rounded(tmp_path: Path) -> None:
    (cell,) = read_run(write(tmp_path, {**PLAIN, "step_ns": 10.6, "loss": 0.25})).cells
    assert (cell.step_ns, cell.loss) == (11, "0.25")


def test_a_last_line_that_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, PLAIN, '{"format": 1, "workl', end=""))
    assert len(run.cells) == 1
    assert run.notes == ("cells.jsonl: line 2, the last, was cut off and is ignored.",)


def test_a_run_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    write(tmp_path, PLAIN, '{"format": 1, "workl', end="")
    append_cells(tmp_path, [Cell("net", "checkpoint")])
    run = read_run(tmp_path)
    assert [cell.peer for cell in run.cells] == ["plain", "checkpoint"]
    assert run.notes == ()


def test_of_two_cells_that_say_the_same_the_later_counts(tmp_path: Path) -> None:
    first = {**PLAIN, "step_ns": 1}
    run = read_run(write(tmp_path, first, {**PLAIN, "peer": "other"}, {**PLAIN, "status": "failed"}))
    assert [(cell.peer, cell.status) for cell in run.cells] == [("other", "ok"), ("plain", "failed")]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batch", "64", "batch: expected a number, 0 or more, got '64'."),
        ("step_ns", True, "step_ns: expected a number, 0 or more, got True."),
        ("step_ns", -1, "step_ns: expected a number, 0 or more, got -1."),
        ("peak_bytes", float("nan"), "peak_bytes: expected a number, 0 or more, got nan."),
        ("step_times_ns", [1, "x"], "step_times_ns[1]: expected a number, 0 or more, got 'x'."),
        ("step_times_ns", 3, "step_times_ns: expected a list of numbers, got 3."),
        ("workload", 7, "workload: expected text, got 7."),
        ("peer", None, "peer: expected text, but the field is missing."),
        (
            "status",
            "fine",
            "status: expected one of 'ok', 'out-of-memory', 'failed', 'not-run', 'timed-out', got 'fine'.",
        ),
        ("place", "moon", "place: expected one of 'cuda', 'sim', 'virtual', got 'moon'."),
        ("clock", "sun", "clock: expected one of 'device', 'host', 'virtual', got 'sun'."),
        ("identical", 1, "identical: expected true or false, got 1."),
        ("versions", ["torch"], "versions: expected an object of names and versions, got ['torch']."),
        ("loss", [1], "loss: expected a number or text, got [1]."),
    ],
)
def test_a_field_of_another_type_is_named_with_its_line(tmp_path: Path, field: str, value: object, said: str) -> None:
    write(tmp_path, {**PLAIN, "peer": "first"}, {**PLAIN, field: value})
    with pytest.raises(FormatError) as refused:
        read_run(tmp_path)
    assert str(refused.value) == f"{tmp_path / 'cells.jsonl'}, line 2: {said}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: expected JSON"),
        ("[1]", "line 1: expected a JSON object, got [1]."),
        ({**PLAIN, "format": 2}, "line 1: expected cells of format 1, which this vdnn reads, got 2"),
    ],
)
def test_a_line_that_is_no_cell_is_named(tmp_path: Path, line: object, said: str) -> None:
    write(tmp_path, line, PLAIN)
    with pytest.raises(FormatError) as refused:
        read_run(tmp_path)
    assert said in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="expected text in UTF-8, got an invalid byte at 0"):
        read_run(tmp_path)


@pytest.mark.parametrize("kind", ["a folder that has neither", "a file", "a path without a file"])
def test_what_is_no_run_says_what_was_looked_for(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "a file":
        place.write_text("")
    elif kind != "a path without a file":
        place.mkdir()
    with pytest.raises(InvalidArgumentError) as refused:
        read_run(place)
    assert "expected a folder with cells.jsonl or steps/" in str(refused.value)
    assert str(refused.value).endswith(f"got {kind}.")


def test_an_empty_run_is_a_run(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, end=""))
    assert (run.cells, run.steps, run.notes) == ((), (), ())


# Steps.


def test_a_step_is_read_as_it_was_saved(tmp_path: Path) -> None:
    step = tightest()
    assert step.save(tmp_path) == tmp_path / "steps" / "tightest"
    assert read_run(tmp_path).steps == (step,)


def test_what_an_earlier_step_of_the_name_had_is_gone(tmp_path: Path) -> None:
    step = tightest()
    step.save(tmp_path)
    bare = SavedStep(step.name, recording=step.recording)
    bare.save(tmp_path)
    assert read_run(tmp_path).steps == (bare,)


def test_folders_without_any_of_the_files_are_no_steps(tmp_path: Path) -> None:
    (tmp_path / "steps" / "empty").mkdir(parents=True)
    (tmp_path / "steps" / "notes.txt").write_text("")
    assert read_run(tmp_path).steps == ()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\\b", "a\nb"])
def test_a_name_that_is_no_folder_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the name of a step: expected a name for its folder"):
        SavedStep(name).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_step_is_refused(tmp_path: Path) -> None:
    step = tightest()
    assert step.recording is not None
    shorter = replace(step.recording, lifetimes=step.recording.lifetimes[:-1])
    replace(step, recording=shorter).save(tmp_path)
    with pytest.raises(FormatError, match="plan.json is for another step than recording.json"):
        read_run(tmp_path)


def test_a_broken_file_of_a_step_is_named(tmp_path: Path) -> None:
    folder = tightest().save(tmp_path)
    (folder / "plan.json").write_text("{")
    with pytest.raises(
        FormatError, match="plan.json: vdnn plan: expected JSON, got text that is not JSON or was cut off"
    ):
        read_run(tmp_path)


def test_a_step_that_cannot_be_read_is_left_out_and_named_where_there_is_more(tmp_path: Path) -> None:
    step = tightest()
    step.save(tmp_path)
    folder = replace(step, name="broken").save(tmp_path)
    (folder / "plan.json").write_text((folder / "plan.json").read_text().replace('"version":', '"version":1'))
    run = read_run(tmp_path)
    assert run.steps == (step,)
    (note,) = run.notes
    assert note.startswith(f"A step is ignored: {folder / 'plan.json'}: vdnn plan: expected version")


def test_plans_of_several_budgets_are_one_comparison(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    (comparison,) = comparisons(run)
    assert (comparison.name, comparison.where) == ("network, batch 16", "virtual titan-x")
    assert [cell.peer for cell in comparison.in_order] == ["plain", *["vdnn-auto"] * len(BUDGETS)]
    assert sorted(step.name for step in run.steps) == sorted(str(cell.step) for cell in run.cells if cell.step)
    assert all(step.reasons is not None for step in run.steps)


def test_a_step_without_a_cell_makes_its_own(tmp_path: Path) -> None:
    step = tightest()
    step.save(tmp_path)
    plain, planned = cells_of_run(read_run(tmp_path))
    assert step.recording is not None
    assert step.measured is not None
    assert (plain.step_ns, plain.peak_bytes) == (step.recording.compute_ns, step.recording.peak_bytes)
    assert plain.said.startswith("not run")
    assert (planned.peer, planned.step_ns, planned.place) == ("vdnn-auto", step.measured.step_ns, "virtual")
    assert planned.stall_ns == step.measured.stall_ns


def test_what_a_cell_says_can_be_written(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    assert all(json.loads(json.dumps(cell_as_json(cell)))["format"] == 1 for cell in run.cells)
