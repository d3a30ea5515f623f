"""benchmarks.gpu_proof without a GPU: how it counts, judges, goes on after a failure, and says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_proof
from benchmarks.gpu_proof import Step, StepFailed, count_tests, judge_doctor, prove, summary

LINK = {"to_host_bytes_per_s": 25e9, "to_device_bytes_per_s": 24e9, "both_ways_bytes_per_s": 40e9}


def passing(_: float) -> dict[str, Any]:
    return {"things": 3}


def failing(_: float) -> dict[str, Any]:
    raise StepFailed("expected 3 things, found 2\nthing 1\nthing 2")


def crashing(_: float) -> dict[str, Any]:
    raise KeyError("things")


def test_a_failed_step_stops_no_other() -> None:
    steps = [Step("gpu", 1, passing), Step("a", 1, failing), Step("b", 1, crashing), Step("c", 1, passing)]
    outcomes = prove(steps)
    assert [outcome.passed for outcome in outcomes] == [True, False, False, True]
    assert outcomes[2].said == "KeyError: 'things'"
    assert summary(outcomes).endswith("2 passed, 2 failed")


def test_without_a_gpu_the_rest_is_reported_as_not_run() -> None:
    def no_gpu(_: float) -> dict[str, Any]:
        raise StepFailed("no GPU: the driver sees none")

    outcomes = prove([Step("gpu", 1, no_gpu), Step("install", 1, crashing)])
    assert [outcome.said for outcome in outcomes] == [
        "no GPU: the driver sees none",
        "not run: there is no GPU",
    ]
    assert "0 passed, 2 failed" in summary(outcomes)


def test_what_a_failed_step_found_is_kept() -> None:
    def finding(_: float) -> dict[str, Any]:
        raise StepFailed("two of three", {"things": 2})

    (outcome,) = prove([Step("gpu", 1, finding)])
    assert (outcome.passed, outcome.said, outcome.facts) == (False, "two of three", {"things": 2})


def test_all_steps_together_stay_below_ten_minutes() -> None:
    assert gpu_proof.BUDGET_S < 600
    assert gpu_proof.STEPS[-1].name == "gpu steps", "it takes what time is left"


def test_a_step_gets_no_more_time_than_is_left() -> None:
    limits: list[float] = []

    def noting(limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        return {}

    prove([Step("gpu", 500, noting), Step("a", 2, noting)], budget_s=100)
    assert 99 < limits[0] <= 100
    assert limits[1] == 2


def test_a_command_that_fails_shows_the_end_of_its_output() -> None:
    with pytest.raises(StepFailed, match="exit code 3\nlast words"):
        gpu_proof.run(["sh", "-c", "echo last words; exit 3"], 10)


def test_tests_are_counted_from_the_junit_file() -> None:
    xml = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    assert count_tests(xml) == {"run": 9, "failed": 3, "skipped": 3}


# Marked itself, or with the fixture `device`, one of whose devices is a GPU.
MARKED = re.compile(r"\bmark\.gpu\b")
WITH_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice: _C\.Device\b")
DEVICE_OF_ITS_OWN = re.compile(r"^def device\(", re.MULTILINE)


def may_need_gpu(test: Path) -> bool:
    text = test.read_text()
    return bool(MARKED.search(text) or (WITH_DEVICE.search(text) and not DEVICE_OF_ITS_OWN.search(text)))


def test_every_test_for_a_gpu_is_in_a_place_that_is_run() -> None:
    """Others are not collected there. This file only names the mark."""
    root = gpu_proof.ROOT
    assert [place for place in gpu_proof.CUDA_TESTS if not (root / place).exists()] == []
    elsewhere = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "tests").rglob("test_*.py"))
        if may_need_gpu(path)
        and not path.is_relative_to(root / "tests" / "house")
        and not any(path.is_relative_to(root / place) for place in gpu_proof.CUDA_TESTS)
    ]
    assert elsewhere == []


def steps_result(*rows: dict[str, Any]) -> dict[str, Any]:
    usual = {"model": "net", "said": "", "peak_bytes": 1, "budget_bytes": None, "identical": True}
    return {"device": "H200", "steps": [{**usual, **row} for row in rows]}


def stand_in_for_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: dict[str, Any] | None) -> list[str]:
    """In place of the program: it writes this, or nothing. Returns the command as it will have been."""
    commands: list[str] = []

    def run(command: list[str], limit_s: float, **environment: str) -> str:
        commands.extend(command)
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if content is None:
            raise StepFailed("exit code 1")
        (tmp_path / "gpu_steps.json").write_text(json.dumps(content))
        return "a table"

    monkeypatch.setattr(gpu_proof, "WORK", tmp_path)
    monkeypatch.setattr(gpu_proof, "run", run)
    return commands


def test_training_steps_are_given_time_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = steps_result({"way": "plain"}, {"way": "vdnn-all"})
    commands = stand_in_for_steps(monkeypatch, tmp_path, content)
    assert gpu_proof.measure_steps(300) == content
    assert commands[-2:] == ["--limit-s", "260"]
    outcome = gpu_proof.Outcome("gpu steps", True, 1.0, "", content)
    assert gpu_proof.headline(outcome) == "2 of 2 ways of 1 models ran, gradients identical in 2"


def test_training_steps_that_fail_are_in_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = steps_result({"way": "plain"}, {"way": "vdnn-all", "said": "DriverError: refused"})
    stand_in_for_steps(monkeypatch, tmp_path, content)
    (outcome,) = prove([Step("gpu steps", 300, gpu_proof.measure_steps)])
    assert outcome.said == "net: vdnn-all: DriverError: refused"
    assert outcome.facts == content


def test_training_steps_that_leave_nothing_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_for_steps(monkeypatch, tmp_path, None)
    with pytest.raises(StepFailed, match="exit code 1"):
        gpu_proof.measure_steps(300)


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
    outcome = gpu_proof.Outcome("link", True, 1.0, "", facts)
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


def test_results_go_where_out_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    path = gpu_proof.write_results(prove([Step("gpu", 1, passing)]))
    assert path == tmp_path / "out" / "gpu_proof.json"
    assert json.loads(path.read_text())["steps"][0]["facts"] == {"things": 3}
