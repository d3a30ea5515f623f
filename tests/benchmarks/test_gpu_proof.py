"""benchmarks.gpu_proof without a GPU: limits, failures, what is kept when it is stopped, and its dry run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_proof
from benchmarks.gpu_proof import Part
from benchmarks.on_a_gpu import proof_parts
from benchmarks.on_a_gpu.judges import Judged
from benchmarks.on_a_gpu.proof_parts import PART_S, PARTS, ROOT, SPARE_S, Context, Step
from benchmarks.on_a_gpu.proof_results import Results

SAYS_ONE = "print('one')"


def python(code: str) -> Callable[[Context, float], list[str]]:
    return lambda context, limit_s: [sys.executable, "-c", code]


def no_judge(log: Path, work: Path) -> Judged:
    return Judged(found=(log.read_text().strip(),))


def step(name: str, code: str = SAYS_ONE, limit_s: float = 60, **changes: Any) -> Step:
    return Step(name, limit_s, python(code), changes.pop("judge", no_judge), **changes)


def machine(gpus: int = 1) -> Step:
    return step("machine", judge=lambda log, work: Judged(facts={"gpus": gpus}), must_find="gpus")


def part_of(tmp_path: Path, *steps: Step) -> Part:
    work = tmp_path / "work"
    work.mkdir()
    return Part("checks", steps, Context(work, dry=False), Results(tmp_path / "out", "gpu_checks", work))


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "gpu_checks.jsonl").read_text().splitlines()]


# Steps.


def crashing(log: Path, work: Path) -> Judged:
    raise KeyError("things")


def test_a_failed_step_stops_no_other_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    part = part_of(
        tmp_path,
        machine(),
        step("a", "print('last words'); raise SystemExit(3)"),
        step("b", judge=crashing),
        step("c", judge=lambda log, work: Judged(("2 of 3 things",), facts={"things": 2})),
        step("d"),
    )
    part.run()
    assert [outcome.passed for outcome in part.outcomes] == [True, False, False, False, True]
    assert [outcome.said for outcome in part.outcomes] == [
        "",
        "exit code 3",
        "its output cannot be judged: KeyError: 'things'",
        "2 of 3 things",
        "",
    ]
    assert "last words" in part.verdicts()
    assert part.verdicts().endswith("gpu-proof checks: 2 passed, 3 failed")
    assert [row["facts"] for row in rows_of(tmp_path)][3] == {"things": 2}


HANGS = """
import threading
print("about to wait")
def stuck():
    threading.Event().wait()
stuck()
"""


@pytest.mark.slow
def test_a_step_that_runs_past_its_limit_shows_its_log_and_where_it_was(tmp_path: Path) -> None:
    part = part_of(tmp_path, machine(), step("a", HANGS, limit_s=4), step("b"))
    part.run()
    assert [outcome.passed for outcome in part.outcomes] == [True, False, True]
    assert part.outcomes[1].said == "ran past its 4 s and was ended"
    for found in (part.verdicts(), (tmp_path / "out" / "gpu_checks.log").read_text()):
        assert "about to wait" in found
        assert re.search(r'File "<string>", line 5 in stuck', found)


def is_gone(process: int) -> bool:
    """Wait a while for the end of a process that was killed, which the kernel brings about in its own time."""
    status = Path("/proc", str(process), "status")
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        os.sched_yield()
    return False


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    waits = "import threading; threading.Event().wait()"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {waits!r}]).pid)"
    part = part_of(tmp_path, machine(), step("a", code))
    part.run()
    assert is_gone(int(part.outcomes[1].found[0]))


def test_without_a_gpu_nothing_else_runs_and_what_another_machine_found_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu_checks.jsonl").write_text("found elsewhere\n")
    part = part_of(tmp_path, machine(gpus=0), step("a"))
    part.run()
    assert [outcome.step for outcome in part.outcomes] == ["machine"]
    assert "a                      not run" in part.verdicts()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu_checks.jsonl"]
    assert (tmp_path / "out" / "gpu_checks.jsonl").read_text() == "found elsewhere\n"


def test_a_missing_package_is_named_and_the_step_does_not_run(tmp_path: Path) -> None:
    part = part_of(tmp_path, machine(), step("a", needs=("json", "no_such_package")), step("b"))
    part.run()
    assert [outcome.passed for outcome in part.outcomes] == [True, None, True]
    assert part.outcomes[1].said == "needs no_such_package, which this Python lacks"


def test_a_step_that_takes_the_rest_gets_what_earlier_ones_left(tmp_path: Path) -> None:
    part = part_of(tmp_path, machine(), step("a", takes_rest=True), step("b", limit_s=10, takes_rest=True), step("c"))
    part.run()
    limits = [outcome.limit_s for outcome in part.outcomes]
    assert 100 < limits[1] <= 120, "its own 60 s, and what the first left of 60 s"
    assert limits[2:] == [20, 60], "at most twice its limit"


def test_a_part_whose_time_is_over_runs_no_more_steps(tmp_path: Path) -> None:
    part = part_of(tmp_path, step("a"))
    part.run(part_s=0.0)
    assert (part.outcomes[0].passed, part.outcomes[0].said) == (None, "no time is left")


def test_results_are_there_while_a_step_runs(tmp_path: Path) -> None:
    """The step itself waits until its row is among the results."""
    rows, results = tmp_path / "work" / "rows.jsonl", tmp_path / "out" / "gpu_checks.jsonl"
    code = f"""
import pathlib
print("looking", flush=True)
pathlib.Path({str(rows)!r}).write_text('{{"found": 1}}\\n{{"cut')
while '"found": 1' not in pathlib.Path({str(results)!r}).read_text():
    pass
"""
    part = part_of(tmp_path, machine(), step("a", code))
    part.run()
    assert part.outcomes[1].passed
    assert rows_of(tmp_path)[1] == {"step": "a", "from": "rows.jsonl", "row": {"found": 1}}
    assert "=== a ===\nlooking\n" in (tmp_path / "out" / "gpu_checks.log").read_text()
    with tarfile.open(tmp_path / "out" / "gpu_checks.tar.gz") as archive:
        assert "work/rows.jsonl" in archive.getnames()


# Stops. The program runs as a process, with two steps: one says that there is a GPU, one writes a row and waits.

STOPPED = """
import sys
from pathlib import Path
from benchmarks import gpu_proof
from benchmarks.on_a_gpu.judges import Judged
from benchmarks.on_a_gpu.proof_parts import Step

gpu_proof.WORK = Path(sys.argv[1])
code = '''
import os, pathlib, threading
pathlib.Path("PLACE/checks/rows.jsonl").write_text('{"pid": %d}' % os.getpid() + chr(10))
threading.Event().wait()
'''.replace("PLACE", sys.argv[1])
steps = (
    Step("machine", 60, lambda *_: [sys.executable, "-c", ""], lambda *_: Judged(facts={"gpus": 1}), must_find="gpus"),
    Step("waits", 300, lambda *_: [sys.executable, "-c", code], lambda *_: Judged()),
    Step("behind", 60, lambda *_: [sys.executable, "-c", ""], lambda *_: Judged()),
)
sys.exit(gpu_proof.run_part("checks", dry=False, steps=lambda: steps))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_its_results(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "OUT": str(out), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "work")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    path = out / "gpu_checks.jsonl"
    while process.poll() is None and not (path.exists() and '"pid"' in path.read_text()):
        os.sched_yield()
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    rows = rows_of(tmp_path)
    assert (rows[0]["step"], rows[0]["passed"]) == ("machine", True)
    assert (rows[1]["step"], rows[1]["from"]) == ("waits", "rows.jsonl")
    assert is_gone(rows[1]["row"]["pid"])
    assert "machine" in (out / "gpu_checks.txt").read_text(), "the verdicts so far"
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert re.search(r"waits +FAILED .* was stopped", said)
        assert said.rstrip().endswith("gpu-proof checks: 1 passed, 1 failed, 1 not run")


# Parts.


@pytest.mark.parametrize("name", PARTS)
def test_the_limits_of_a_part_add_up_to_less_than_nine_minutes(name: str) -> None:
    assert PART_S <= 9 * 60
    assert sum(one.limit_s for one in PARTS[name]) <= PART_S - SPARE_S
    assert [one.name for one in PARTS[name][:2]] == ["machine", "build"], "each part stands alone"
    assert len({one.name for one in PARTS[name]}) == len(PARTS[name])


@pytest.mark.parametrize("name", PARTS)
def test_on_a_gpu_no_step_is_one_of_the_dry_run(name: str, tmp_path: Path) -> None:
    """The commands of the two differ where a program would use a GPU."""
    of_gpu = [" ".join(one.command(Context(tmp_path, dry=False), 60)) for one in PARTS[name]]
    assert not re.search(r"sim\b|virtual|--device cpu|as-it-is|without-gpu|fake", " ".join(of_gpu))
    of_none = [" ".join(one.command(Context(tmp_path, dry=True), 60)) for one in PARTS[name]]
    same = [one.name for one, gpu, none in zip(PARTS[name], of_gpu, of_none, strict=True) if gpu == none]
    assert set(same) <= {"hooks", "claims"}, "these need no GPU"


@pytest.mark.parametrize("name", PARTS)
def test_with_a_core_that_is_there_only_the_build_differs(name: str, tmp_path: Path) -> None:
    usual, as_it_is = (
        [one.command(Context(tmp_path, dry=False, as_it_is=given), 60) for one in PARTS[name]]
        for given in (False, True)
    )
    differ = [one.name for one, first, second in zip(PARTS[name], usual, as_it_is, strict=True) if first != second]
    assert differ == ["build"]
    assert "--as-it-is" in as_it_is[1]


def test_an_unknown_part_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_proof.main(["everything"])
    said = capsys.readouterr().err
    assert [name for name in PARTS if name not in said] == []


@pytest.mark.slow
@pytest.mark.full  # minutes; test_gpu_proof_programs.py tries each program
@pytest.mark.parametrize("name", ["checks", "steps", "zoo"])
def test_a_dry_run_goes_through_every_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_proof, "WORK", tmp_path / "work")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        code = gpu_proof.main([name, "--dry-run"])
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    said = capfd.readouterr().out
    assert code == 0, said
    assert f"{len(PARTS[name])} passed, 0 failed" in said
    assert len(said.split("gpu-proof " + name)[1]) < 12_000
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"dry_{name}{suffix}" for suffix in (".jsonl", ".log", ".txt", ".tar.gz")
    }
    assert (tmp_path / "out" / f"dry_{name}.txt").read_text().strip() in said


# A test needs a GPU if it has the mark, or uses the fixture `device`, one of whose devices is a GPU.
MARKED = re.compile(r"\bmark\.gpu\b")
WITH_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice: _C\.Device\b")
DEVICE_OF_ITS_OWN = re.compile(r"^def device\(", re.MULTILINE)


def may_need_gpu(test: Path) -> bool:
    folders = test.relative_to(ROOT / "tests").parents
    fixtures = [ROOT / "tests" / folder / "conftest.py" for folder in folders if folder.name]
    text = "".join(path.read_text() for path in (test, *fixtures) if path.exists())
    return bool(MARKED.search(text) or (WITH_DEVICE.search(text) and not DEVICE_OF_ITS_OWN.search(text)))


def test_every_test_for_a_gpu_is_in_a_place_that_is_run(tmp_path: Path) -> None:
    """Tests in other folders are not collected on the GPU. This file only names the mark."""
    commands = [one.command(Context(tmp_path, dry=False), 60) for one in proof_parts.TESTS]
    places = [ROOT / next(word for word in command if word.startswith("tests/")) for command in commands]
    assert [place for place in places if not place.exists()] == []
    elsewhere = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if may_need_gpu(path) and path != Path(__file__) and not any(path.is_relative_to(place) for place in places)
    ]
    assert elsewhere == []


def test_each_place_needs_what_its_files_import() -> None:
    """A package that is missing then stops one folder, and says so."""
    lent = {"pytest", "hypothesis", "numpy", "pytest_benchmark", "expecttest", "scipy", "matplotlib"}
    for one in proof_parts.TESTS:
        command = one.command(Context(ROOT, dry=False), 60)
        place = ROOT / next(word for word in command if word.startswith("tests/"))
        files = [ROOT / "tests" / "conftest.py", *(place.rglob("*.py") if place.is_dir() else [place])]
        imported = {name for file in files for name in re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.M)}
        assert imported & lent <= set(one.needs), one.name


@pytest.mark.parametrize("name", PARTS)
def test_the_page_has_the_limits_of_the_parts(name: str) -> None:
    row = re.search(rf"^\| `{name}` \|.*\| ([\d ,+]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert row is not None
    assert [float(limit) for limit in re.findall(r"\d+", row[1])] == [one.limit_s for one in PARTS[name]]
