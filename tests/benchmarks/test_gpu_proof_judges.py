"""The judges of gpu-proof and its verdicts: what they read of programs, and that the text stays short."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_a_gpu.judges import (
    Judged,
    judge_claims,
    judge_doctor,
    judge_hooks,
    judge_machine,
    judge_sweep,
    judge_table,
    judge_tests,
)
from benchmarks.on_a_gpu.verdicts import Outcome, render_verdicts

LINK = {"to_host_bytes_per_s": 25e9, "to_device_bytes_per_s": 24e9, "both_ways_bytes_per_s": 40e9}


def logged(tmp_path: Path, text: str) -> Path:
    log = tmp_path / "log"
    log.write_text(text)
    return log


# Tests.


def test_tests_are_counted_and_a_skip_is_said_but_no_failure(tmp_path: Path) -> None:
    text = """
tests/device/test_x.py::test_a[cuda] PASSED
tests/device/test_x.py::test_b[cuda, 1 x 2] PASSED
tests/device/test_x.py::test_c[cuda] SKIPPED (a real GPU's memo...)
=== short test summary info ===
SKIPPED [1] tests/device/test_x.py:244: a real GPU's memory cannot be looked at after close()
"""
    judged = judge_tests(logged(tmp_path, text), tmp_path)
    assert judged.problems == ()
    assert judged.found == ("2 passed, 1 skipped", "skipped, 1: a real GPU's memory cannot be looked at after close()")


def test_tests_that_fail_are_named_and_tests_that_are_all_skipped_prove_nothing(tmp_path: Path) -> None:
    failed = "tests/x.py::test_a PASSED\ntests/x.py::test_b FAILED\ntests/x.py::test_c ERROR\n"
    judged = judge_tests(logged(tmp_path, failed), tmp_path)
    assert judged.problems == ("2 tests failed",)
    assert judged.found == ("1 passed, 1 failed, 1 error", "failed: tests/x.py::test_b", "failed: tests/x.py::test_c")
    skipped = "tests/x.py::test_a SKIPPED\nSKIPPED [1] tests/x.py:3: torch 2.11.0 sees no GPU\n"
    assert judge_tests(logged(tmp_path, skipped), tmp_path).problems == ("no test passed",)


def test_the_test_that_hung_is_named(tmp_path: Path) -> None:
    text = "tests/x.py::test_a PASSED\ntests/x.py::test_b[cuda] Fatal Python error: Aborted\n"
    begun = "tests/x.py::test_a PASSED\ntests/x.py::test_b[cuda] "
    assert judge_tests(logged(tmp_path, begun), tmp_path).found[-1] == "did not end: tests/x.py::test_b[cuda]"
    assert judge_tests(logged(tmp_path, text), tmp_path).found[-1] == "did not end: tests/x.py::test_b[cuda]"


# Machine, doctor, tables, hooks, claims.


def test_a_machine_without_a_gpu_is_a_problem(tmp_path: Path) -> None:
    assert judge_machine(logged(tmp_path, ""), tmp_path).facts["gpus"] == 0
    report = {"gpus": 0, "lines": ["no GPU: the driver sees none"]}
    (tmp_path / "machine.json").write_text(json.dumps(report))
    assert judge_machine(logged(tmp_path, ""), tmp_path).problems == ("no GPU: the driver sees none",)


def doctor_said(tmp_path: Path, **changes: Any) -> Judged:
    report = {
        "gpus": [{"ordinal": 0, "name": "H200", "link": LINK, "problem": None}],
        "codecs": [{"kernel": "pack_bits", "available": True, "reason": None}],
        "driver": {"problem": None},
        **changes,
    }
    return judge_doctor(logged(tmp_path, f"a warning\n{json.dumps(report, indent=2)}\n"), tmp_path)


def test_a_measured_link_and_device_code_pass(tmp_path: Path) -> None:
    judged = doctor_said(tmp_path)
    assert judged.problems == ()
    assert judged.found == ("H200: GB/s to host 25.0, to device 24.0, both 40.0",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": [], "driver": {"problem": "hidden"}}, "the doctor sees no GPU: hidden"),
        ({"gpus": [{"ordinal": 0, "link": None, "problem": "cannot pin"}]}, "GPU 0: cannot pin"),
        ({"codecs": [{"kernel": "pack", "available": False, "reason": "no nvcc"}]}, "kernel pack: no nvcc"),
    ],
)
def test_a_report_that_proves_nothing_fails(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert doctor_said(tmp_path, **changes).problems == (said,)


def test_a_table_is_found_below_what_else_was_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"cut')
    log = logged(tmp_path, "UserWarning: old\nTitle\n-----\nhead\n-----\n1\n2\n-----\nremark\n")
    judged = judge_table("rows.jsonl")(log, tmp_path)
    assert (judged.problems, judged.found) == ((), ("Title", "head", "1", "2", "remark"))
    assert judged.facts == {"rows": [{"a": 1}, {"a": 2}]}
    assert judge_table("none.jsonl")(logged(tmp_path, "Traceback"), tmp_path).problems == ("no rows in none.jsonl",)


def test_hooks_are_said_with_their_settled_multiples(tmp_path: Path) -> None:
    assert judge_hooks(logged(tmp_path, ""), tmp_path).problems == ("the program wrote no figures",)
    rows = [{"way": "vdnn, kept", "cost_ns": 2500.0, "no_ops": 1.5}, {"way": "peer", "cost_ns": 1.0, "no_ops": None}]
    (tmp_path / "hook_cost.json").write_text(json.dumps({"rows": rows, "kept_settled": 1.9}))
    assert judge_hooks(logged(tmp_path, ""), tmp_path).found == (
        "vdnn, kept: 2.50 us, 1.5 x no-op hooks",
        "peer: 0.00 us, 0.0 x no-op hooks",
        "kept_settled: 1.9",
    )


def test_only_broken_promises_are_failures(tmp_path: Path) -> None:
    text = "held       one\nmissed     two\nBROKEN     three\n"
    judged = judge_claims(logged(tmp_path, text), tmp_path)
    assert judged.problems == ("BROKEN     three",)
    assert len(judged.found) == 3
    assert judge_claims(logged(tmp_path, ""), tmp_path).problems == ("no claims were printed",)


# Cells.


def cell(peer: str, **changes: Any) -> dict[str, Any]:
    usual = {"workload": "net", "status": "ok", "said": "", "step_ns": 2_000_000, "peak_bytes": 1100 << 20}
    return {**usual, "peer": peer, "requested_bytes": 1 << 30, **changes}


def judged_cells(tmp_path: Path, *cells: dict[str, Any], log: str = "") -> Judged:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "cells.jsonl").write_text("".join(json.dumps(one) + "\n" for one in cells) + '{"cut')
    return judge_sweep("run", ("net",))(logged(tmp_path, log), tmp_path)


def test_cells_are_shown_beside_plain_in_requested_bytes(tmp_path: Path) -> None:
    ours = cell(
        "vdnn-auto",
        budget="75%",
        step_ns=2_100_000,
        requested_bytes=768 << 20,
        budget_bytes=768 << 20,
        predicted_step_ns=2_050_000,
        predicted_peak_bytes=767 << 20,
        to_host_bytes=1 << 28,
        stall_ns=300_000,
        identical=True,
    )
    judged = judged_cells(
        tmp_path, cell("plain"), ours, cell("plain", workload="another"), log="the time limit is reached"
    )
    assert judged.problems == ()
    assert judged.found == (
        "net plain: 2.00 ms, 1.00 GiB",
        "net vdnn-auto 75%: 2.10 ms, 1.050 x, 0.75 GiB, 75.0%, budget 0.75 GiB, predicted 2.05 ms 0.75 GiB, "
        "out 0.25 GiB, stalls 0.3 ms, bits as plain",
        "the time was over before all cells had run",
    )


OURS = cell("vdnn-auto", budget="90%")


@pytest.mark.parametrize(
    ("cells", "problems"),
    [
        ((cell("plain"), OURS, cell("trl", status="failed")), ()),
        ((cell("plain"), OURS, cell("vdnn-auto", status="failed", said="budget 1 cannot be met: 2")), ()),
        ((cell("plain"), OURS, cell("vdnn-auto", status="failed", said="no")), ("net vdnn-auto: failed: no",)),
        ((cell("plain"), cell("vdnn-auto", status="failed", said="no"), cell("vdnn-auto")), ()),  # run again
        ((cell("plain"), OURS, cell("vdnn-all", status="timed-out")), ("net vdnn-all: timed-out: ",)),
        ((cell("plain"), {**OURS, "identical": False}), ("net vdnn-auto 90%: gradients differ from plain's",)),
        ((cell("plain", status="failed", said="x"), OURS), ("net plain: failed: x",)),
        ((cell("plain"), cell("checkpoint")), ("no cell of vdnn ran",)),
        ((), ("no cell of vdnn ran", "the sweep wrote no cells")),
    ],
)
def test_what_is_ours_must_run_and_have_plains_gradients(
    tmp_path: Path, cells: tuple[dict[str, Any], ...], problems: tuple[str, ...]
) -> None:
    assert judged_cells(tmp_path, *cells).problems == problems


# Verdicts.


def test_verdicts_say_each_step_and_show_the_log_of_what_failed() -> None:
    outcomes = [
        Outcome("machine", True, 2.0, 45, found=("one GPU",), log="not shown"),
        Outcome("build", False, 3.0, 125, "exit code 2", log="error: the last line"),
        Outcome("tests", None, 0.0, 60),
    ]
    assert render_verdicts("gpu-proof checks", outcomes).splitlines() == [
        "",
        "gpu-proof checks",
        "  machine                passed     2.0 of  45 s",
        "      one GPU",
        "  build                  FAILED     3.0 of 125 s  exit code 2",
        "      --- the end of its log ---",
        "error: the last line",
        "      ---",
        "  tests                  not run    0.0 of  60 s",
        "gpu-proof checks: 1 passed, 1 failed, 1 not run",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_stay_below_twelve_thousand_characters(seed: int) -> None:
    draw = random.Random(seed)
    outcomes = [
        Outcome(
            f"step {index}",
            draw.choice([True, False, False, None]),
            1.0,
            60,
            "said " * draw.choice([0, 10, 5000]),
            tuple("found" * draw.choice([1, 20, 400]) for _ in range(draw.choice([0, 3, 200]))),
            "\n".join(["a line of the log"] * draw.choice([0, 10, 4000]) + [f"last of {index}"]),
        )
        for index in range(draw.randint(1, 16))
    ]
    text = render_verdicts("gpu-proof zoo", outcomes)
    assert len(text) < 12_000
    for outcome in outcomes:
        assert f"\n  {outcome.step:22} " in text, "each step has its line"
        if outcome.passed is False:
            assert f"last of {outcome.step.split()[1]}\n" in text, "and each that failed the end of its log"
    assert text.splitlines()[-1].startswith("gpu-proof zoo: ")
