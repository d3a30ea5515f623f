"""benchmarks.gpu_proof without a GPU: how it counts and judges, and how it continues after a failure and reports it."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_proof
from benchmarks.gpu_proof import Outcome, Results, prove, steps_of, summary
from benchmarks.on_a_gpu import gpu_parts
from benchmarks.on_a_gpu.gpu_parts import PARTS, Step, StepFailed, count_tests, judge_doctor

LINK = {"to_host_bytes_per_s": 25e9, "to_device_bytes_per_s": 24e9, "both_ways_bytes_per_s": 40e9}


def step(name: str, prove: Callable[[float], dict[str, Any]], limit_s: float = 1, least_s: float = 0) -> Step:
    return Step(name, "build", limit_s, least_s, prove)


def passing(_: float) -> dict[str, Any]:
    return {"things": 3}


def failing(_: float) -> dict[str, Any]:
    raise StepFailed("expected 3 things, found 2\nthing 1\nthing 2")


def crashing(_: float) -> dict[str, Any]:
    raise KeyError("things")


def test_a_failed_step_stops_no_other() -> None:
    steps = [step("gpu", passing), step("a", failing), step("b", crashing), step("c", passing)]
    outcomes = prove(steps)
    assert [outcome.passed for outcome in outcomes] == [True, False, False, True]
    assert outcomes[2].said == "KeyError: 'things'"
    assert summary(outcomes).endswith("2 passed, 2 failed")


def test_without_a_gpu_the_rest_is_reported_as_not_run() -> None:
    def no_gpu(_: float) -> dict[str, Any]:
        raise StepFailed("no GPU: the driver sees none")

    outcomes = prove([step("gpu", no_gpu), step("install", crashing)])
    assert [outcome.said for outcome in outcomes] == [
        "no GPU: the driver sees none",
        "not run: there is no GPU",
    ]
    assert "0 passed, 2 failed" in summary(outcomes)


def test_what_a_failed_step_found_is_kept() -> None:
    def finding(_: float) -> dict[str, Any]:
        raise StepFailed("two of three", {"things": 2})

    (outcome,) = prove([step("gpu", finding)])
    assert (outcome.passed, outcome.said, outcome.facts) == (False, "two of three", {"things": 2})


def test_all_steps_together_stay_below_nine_minutes() -> None:
    assert gpu_proof.BUDGET_S < 540
    # Each step has at least the time it needs, even if all earlier steps use all that they may.
    assert sum(one.least_s for one in gpu_parts.STEPS) < gpu_proof.BUDGET_S / 1.5
    assert all(one.least_s <= one.limit_s for one in gpu_parts.STEPS)


def test_a_step_leaves_the_later_ones_what_they_need() -> None:
    limits: list[float] = []

    def noting(limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        return {}

    prove([step("gpu", noting, 500), step("a", noting, 2), step("b", noting, 500, least_s=30)], budget_s=100)
    assert 69 < limits[0] <= 70
    assert limits[1] == 2
    assert 99 < limits[2] <= 100


def test_parts_run_alone_behind_the_gpu() -> None:
    assert [one.name for one in steps_of(["races", "link"])] == ["gpu", "doctor", "link", "hooks", "races"]
    assert steps_of(PARTS) == list(gpu_parts.STEPS)
    for parts in (["cnn", "nothing"], []):
        with pytest.raises(
            ValueError, match="PART: expected some of build,tests,link,races,cnn,llm,predict, got nothing"
        ):
            steps_of(parts)


def test_a_command_that_fails_shows_the_end_of_its_output() -> None:
    with pytest.raises(StepFailed, match="exit code 3\nlast words"):
        gpu_parts.run(["sh", "-c", "echo last words; exit 3"], 10)


def test_tests_are_counted_from_the_junit_file() -> None:
    xml = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    assert count_tests(xml) == {"run": 9, "failed": 3, "skipped": 3}


# A test needs a GPU if it has the mark, or uses the fixture `device`, one of whose devices is a GPU.
MARKED = re.compile(r"\bmark\.gpu\b")
WITH_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice: _C\.Device\b")
DEVICE_OF_ITS_OWN = re.compile(r"^def device\(", re.MULTILINE)


def may_need_gpu(test: Path) -> bool:
    text = test.read_text()
    return bool(MARKED.search(text) or (WITH_DEVICE.search(text) and not DEVICE_OF_ITS_OWN.search(text)))


def test_every_test_for_a_gpu_is_in_a_place_that_is_run() -> None:
    """Tests in other folders are not collected on the GPU. This file only names the mark."""
    root = gpu_parts.ROOT
    assert [place for place in (*gpu_parts.CUDA_TESTS, *gpu_parts.RACES) if not (root / place).exists()] == []
    elsewhere = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "tests").rglob("test_*.py"))
        if may_need_gpu(path)
        and not path.is_relative_to(root / "tests" / "house")
        and not any(path.is_relative_to(root / place) for place in (*gpu_parts.CUDA_TESTS, *gpu_parts.RACES))
    ]
    assert elsewhere == []


def cell(peer: str, **changes: Any) -> dict[str, Any]:
    usual = {"workload": "resnet50", "budget": None, "status": "ok", "said": "", "identical": True}
    return {**usual, "peer": peer, **changes}


def stand_in_for_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cells: list[dict[str, Any]], failure: str = ""
) -> list[str]:
    """Replaces the sweep: writes these cells and an incomplete one. Returns the command that it is called by."""
    commands: list[str] = []

    def run(command: list[str], limit_s: float, **environment: str) -> str:
        commands.extend(command)
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if "--out" in command:
            lines = "".join(json.dumps(one) + "\n" for one in cells)
            (tmp_path / "cells.jsonl").write_text(lines + '{"workload": "resn')
        if failure:
            raise StepFailed(failure)
        return "a table"

    monkeypatch.setattr(gpu_parts, "RUN", tmp_path)
    monkeypatch.setattr(gpu_parts, "run", run)
    return commands


def test_a_sweep_is_given_time_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = [cell("plain"), cell("vdnn-auto"), cell("trl", status="not-run"), cell("plain", workload="another")]
    commands = stand_in_for_programs(monkeypatch, tmp_path, cells)
    assert gpu_parts.train_cnns(100) == {"cells": 3, "ok": 2}
    assert commands[-4:] == ["--out", str(tmp_path), "--limit-s", "85"]
    assert ",".join(gpu_parts.CNN) in commands


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (cell("vdnn-auto", status="failed", said="DriverError: no"), "vdnn-auto, None: failed: DriverError: no"),
        (cell("vdnn-auto", status="timed-out", said=""), "vdnn-auto, None: timed-out"),
        (cell("vdnn-auto", identical=False, budget="60%"), "vdnn-auto, 60%: gradients differ"),
    ],
)
def test_what_is_ours_must_not_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, Any], said: str
) -> None:
    stand_in_for_programs(monkeypatch, tmp_path, [cell("plain"), cell("trl", status="failed"), found])
    with pytest.raises(StepFailed, match=said) as failed:
        gpu_parts.train_cnns(100)
    assert failed.value.facts["cells"] == 3


def test_a_sweep_that_breaks_off_fails_with_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_for_programs(monkeypatch, tmp_path, [cell("plain")], failure="exit code 1\nTraceback")
    with pytest.raises(StepFailed, match="exit code 1\nTraceback") as failed:
        gpu_parts.train_cnns(100)
    assert failed.value.facts == {"cells": 1, "ok": 1}


def test_claims_that_are_broken_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_for_programs(monkeypatch, tmp_path, [], "exit code 1\nheld  one\nBROKEN  two")
    with pytest.raises(StepFailed, match="there are no cells"):
        gpu_parts.judge_claims(10)
    (tmp_path / "cells.jsonl").write_text("")
    with pytest.raises(StepFailed, match="BROKEN  two") as failed:
        gpu_parts.judge_claims(10)
    assert failed.value.facts == {"claims": ["held  one", "BROKEN  two"]}


def doctor_report(**changes: Any) -> dict[str, Any]:
    report = {
        "gpus": [{"ordinal": 0, "name": "H200", "link": LINK, "problem": None}],
        "codecs": [{"kernel": "pack_bits", "available": True, "reason": None}],
        "driver": {"problem": None},
        "host": {},
        "torch": {},
    }
    return {**report, **changes}


def test_a_measured_link_and_device_code_pass() -> None:
    facts = judge_doctor(doctor_report())
    outcome = Outcome("doctor", True, 1.0, "", facts)
    assert gpu_proof.headline(outcome) == "H200: GB/s to host 25.0, to device 24.0, both 40.0"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": [], "driver": {"problem": "hidden"}}, "the doctor sees no GPU: hidden"),
        ({"gpus": [{"ordinal": 0, "link": None, "problem": "cannot pin"}]}, "GPU 0: cannot pin"),
        (
            {"codecs": [{"kernel": "pack_bits", "available": False, "reason": "no nvcc"}]},
            "kernel pack_bits: no nvcc",
        ),
    ],
)
def test_a_report_that_proves_nothing_fails(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StepFailed, match=said):
        judge_doctor(doctor_report(**changes))


def test_results_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "cells.jsonl").write_text("{}\n")
    monkeypatch.setattr(gpu_proof, "RUN", run)
    results = Results(tmp_path / "out")

    def looking(_: float) -> dict[str, Any]:
        return {"lines": len(results.path.read_text().splitlines())}

    prove([step("gpu", passing), step("a", failing), step("b", looking)], wrote=results.write)
    lines = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert [line["facts"] for line in lines] == [{"things": 3}, {}, {"lines": 2}]
    with tarfile.open(tmp_path / "out" / "gpu_run.tar.gz") as archive:
        assert "gpu_run/cells.jsonl" in archive.getnames()


def test_without_a_gpu_what_another_machine_found_stays(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.path.write_text("found elsewhere\n")
    prove([step("gpu", failing), step("a", passing)], wrote=results.write)
    assert results.path.read_text() == "found elsewhere\n"
