"""A cell runs in its own process, and any end of that process is recorded as a result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.harness.cell_process import CellProcess, Measure
from benchmarks.harness.cell_spec import CellSpec, cell_of
from tests.patience import PATIENCE_S
from vdnn.report.cell import FAILED, OK, TIMED_OUT, Cell

pytestmark = pytest.mark.slow

SPEC = CellSpec("vgg16", "plain", "virtual", "h100", batch=4)


def run(measure: Measure, folder: Path, *, limit_s: float = PATIENCE_S, forks: bool = True) -> Cell:
    process = CellProcess(measure, folder, limit_s=limit_s, forks=forks).begin(SPEC)
    while True:
        result = process.wait(0.05)
        if result is not None:
            return result


def good(spec: CellSpec) -> Cell:
    return cell_of(spec, step_ns=os.getpid(), peak_bytes=7, said='made of "text"\nin two lines')


def raises(spec: CellSpec) -> Cell:
    raise RuntimeError("the peer's own words\nand more of them")


def dies(spec: CellSpec) -> Cell:
    print("allocating the last straw", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("still alive")


def exits(spec: CellSpec) -> Cell:
    os._exit(3)


def hangs(spec: CellSpec) -> Cell:
    print("waiting for godot", flush=True)
    threading.Event().wait()
    raise AssertionError("it came")


def leaves_a_child(spec: CellSpec) -> Cell:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return cell_of(spec, step_ns=child.pid)


def test_a_result_comes_back_from_another_process(tmp_path: Path) -> None:
    result = run(good, tmp_path)
    assert (result.status, result.peak_bytes, result.said) == (OK, 7, 'made of "text"\nin two lines')
    assert result.step_ns != os.getpid()
    assert not list((tmp_path / "logs").glob(".*")), "what it answered in is gone"


def test_what_a_peer_raises_is_recorded_with_its_type(tmp_path: Path) -> None:
    result = run(raises, tmp_path)
    assert (result.status, result.said) == (FAILED, "RuntimeError: the peer's own words")
    assert "and more of them" in (tmp_path / "logs" / f"{SPEC.step_name}.txt").read_text(), "all of it is in the log"


def test_a_process_that_dies_by_a_signal_is_recorded_with_what_it_said_last(tmp_path: Path) -> None:
    result = run(dies, tmp_path)
    assert result.status == FAILED
    assert result.said == "its process died by SIGSEGV; it said last: allocating the last straw"


def test_a_process_that_ends_without_an_answer_is_recorded(tmp_path: Path) -> None:
    result = run(exits, tmp_path)
    assert (result.status, result.said) == (
        FAILED,
        "its process left no result (FileNotFoundError), and ended with 3",
    )


def test_a_cell_that_hangs_is_ended_and_recorded(tmp_path: Path) -> None:
    result = run(hangs, tmp_path, limit_s=1.0)
    assert result.status == TIMED_OUT
    assert result.said == "took longer than 1 s and was ended; it said last: waiting for godot"


def test_an_answer_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / f".{SPEC.step_name}.json").write_text('{"workload": "old"}')
    assert run(exits, tmp_path).status == FAILED


def test_what_a_cell_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    child = run(leaves_a_child, tmp_path).step_ns
    assert child is not None
    for _ in range(1000):  # the killed process remains until the process that inherited it reaps it
        state = _state_of(child)
        if state in (None, "Z"):
            break
        threading.Event().wait(0.01)
    assert state in (None, "Z")


def _state_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


@pytest.mark.slow
def test_a_fresh_process_answers_as_a_forked_one_does(tmp_path: Path) -> None:
    result = run(good, tmp_path, forks=False)
    assert (result.status, result.peak_bytes) == (OK, 7)


def test_a_process_that_is_made_ahead_waits_for_its_cell_and_ends_without_one(tmp_path: Path) -> None:
    """Its time limit starts when it receives its cell."""
    process = CellProcess(good, tmp_path, limit_s=PATIENCE_S, forks=False)
    assert process.wait_for_end(0.2) is None
    result = None
    process.begin(SPEC)
    while result is None:
        result = process.wait(0.05)
    assert result.peak_bytes == 7
    unused = CellProcess(good, tmp_path, limit_s=PATIENCE_S, forks=False)
    unused.kill()
    assert unused.wait_for_end(PATIENCE_S) is not None
