"""The plans of a session in a report: the sentences and the table, escaped, and their file in the run."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from vdnn.report.page import page_of, plans_of_session
from vdnn.report.run_folder import Run, read_run
from vdnn.report.text_summary import text_summary
from vdnn.step.plan_use import Followed, PlanSummary, PlanUse, StepCount
from vdnn.step.recording import SaveKey
from vdnn.step.saved_step import SavedStep

HOSTILE = "<script>alert(1)</script>"
KEY = SaveKey("AddmmBackward0", "layers.0", "float32", (256, 64), (64, 1), 0)
USE = PlanUse(
    plans=(
        PlanSummary(1, KEY, 3 << 20, 1 << 20, 1.0314, 20),
        PlanSummary(2, replace(KEY, module=HOSTILE), 5 << 20, 0, 1.0, 4),
    ),
    recorded=2,
    made=3,
    tightened=1,
    counts=(StepCount(Followed.OWN_SIZE, 9), StepCount(Followed.LARGER_SIZE, 15), StepCount(Followed.UNPLANNED, 6)),
    last=Followed.UNPLANNED,
)
LINES = (
    "plans: for 2 kinds of step and 2 sizes; 3 made, 1 of them again for less memory, from 2 recorded steps",
    "steps: 24 of 30 followed a plan (80 %): 9 of their own size, 15 of a larger size; 6 ran without one (0 recorded)",
)


def test_the_sentences_say_the_numbers_and_the_share() -> None:
    assert USE.lines() == LINES


def test_without_plans_the_sentences_say_that_no_step_followed_one() -> None:
    none_yet = PlanUse((), 0, 0, 0, (StepCount(Followed.UNPLANNED, 1),), Followed.UNPLANNED)
    assert none_yet.lines() == (
        "plans: for 0 kinds of step and 0 sizes; 0 made, from 0 recorded steps",
        "steps: 0 of 1 followed a plan (0 %); 1 ran without one (0 recorded)",
    )
    assert replace(none_yet, counts=()).lines() == ()
    assert plans_of_session(replace(none_yet, counts=())) == ""
    assert "<table" not in plans_of_session(none_yet)


def test_plan_use_is_read_as_it_was_saved(tmp_path: Path) -> None:
    step = SavedStep("step", plan_use=USE)
    step.save(tmp_path)
    assert read_run(tmp_path).steps == (step,)


def test_the_table_has_a_row_for_each_size() -> None:
    found = plans_of_session(USE)
    assert HOSTILE not in found, "names are escaped"
    cells = re.findall(r"<td [^>]*>([^<]*)</td>", found)
    assert [unescape(cell) for cell in cells] == [
        *("1", str(KEY), "3.00 MiB", "1.00 MiB", "1.031 x", "20"),
        *("2", str(replace(KEY, module=HOSTILE)), "5.00 MiB", "0 B", "1.000 x", "4"),
    ]


def test_the_page_and_the_text_of_a_run_have_them(tmp_path: Path) -> None:
    run = Run(tmp_path, (), (SavedStep("step", plan_use=USE),))
    assert all(f"\n    {line}\n" in text_summary(run) for line in LINES)
    page = page_of(run)
    assert "<h3>The plans of the session</h3><p>Plans: for 2 kinds" in page
    assert page.count("20</td>") == 1
