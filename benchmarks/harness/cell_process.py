"""Runs one cell in a process of its own, with a time limit. However the process ends, there is a result.

On a GPU the process is a new one, which may be started ahead of time: it imports what it needs, touches no device, and
waits for its cell. Without a GPU the process is forked from one that has imported torch, which saves seconds per cell;
that one has made no tensor with data. A cell that raises, hangs, or dies by a signal is recorded with its last line of
output. All output is in the run's `logs/`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.harness.cell_spec import CellSpec, cell_of
from vdnn.errors import VdnnError
from vdnn.report.cell import FAILED, TIMED_OUT, Cell, cell_as_json, cell_from_json

_PR_SET_PDEATHSIG = 1
_FATAL = "Fatal Python error: "  # how faulthandler begins
Measure = Callable[[CellSpec], Cell]


class CellProcess:
    """A process that starts on construction and waits for its cell. `measure` runs in it. With `forks` the process is
    forked, else spawned."""

    def __init__(self, measure: Measure, folder: Path, *, limit_s: float, forks: bool) -> None:
        self._limit_s = limit_s
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork" if forks else "spawn")
        theirs, self._connection = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(target=wait_and_run, args=(theirs, measure))  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            # Python warns of a fork in a process with threads. Those of math libraries exist, but have not run yet.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._answer: Path | None = None

    def begin(self, spec: CellSpec) -> CellProcess:
        """Send the cell to the process; its limit counts from now. If the process is dead, wait() reports it."""
        self.spec = spec
        self._until_s = time.monotonic() + self._limit_s
        self._log = self._logs / f"{spec.step_name}.txt"
        self._answer = self._logs / f".{spec.step_name}.json"
        self._answer.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._connection.send((spec, str(self._log), str(self._answer)))
        self._connection.close()
        return self

    def wait_for_end(self, most_s: float) -> int | None:
        """The exit code of the process, or None if it is still running after `most_s`."""
        self._process.join(most_s)
        return self._process.exitcode

    def wait(self, most_s: float) -> Cell | None:
        """The result, or None if the cell is still running after `most_s`."""
        if self.wait_for_end(most_s) is None:
            if time.monotonic() < self._until_s:
                return None
            self.kill()
            return self._ended(TIMED_OUT, f"took longer than {self._limit_s:.0f} s and was ended")
        result = self._result()
        self.kill()  # ends processes that the cell may have left running
        return result

    def kill(self) -> None:
        """Kill the process and all processes that it started. Does nothing if they have ended."""
        pid = self._process.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._connection.close()
        if self._answer is not None:
            self._answer.unlink(missing_ok=True)

    def _result(self) -> Cell:
        code = self._process.exitcode
        assert code is not None, "the process has ended"
        assert self._answer is not None, "begin() was called"
        if code < 0:
            return self._ended(FAILED, f"its process died by {_signal_name(-code)}")
        try:
            return cell_from_json(json.loads(self._answer.read_text()), "the answer")
        except (OSError, ValueError, VdnnError) as error:
            return self._ended(FAILED, f"its process left no result ({type(error).__name__}), and ended with {code}")

    def _ended(self, status: str, said: str) -> Cell:
        last = last_line(self._log)
        return cell_of(self.spec, status=status, said=f"{said}; it said last: {last}" if last else said)


def wait_and_run(connection: Connection, measure: Measure) -> None:
    """The main function of the new process."""
    with contextlib.suppress(OSError):
        os.setsid()  # so that killing the group ends all its processes, and Ctrl-C reaches only the sweep
    _die_with_parent()
    try:
        spec, log, answer = connection.recv()
    except EOFError:
        return  # the sweep has no cell for this process
    run_and_answer(spec, measure, log, answer)


def run_and_answer(spec: CellSpec, measure: Measure, log: str, answer: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with Path(log).open("w", buffering=1) as file:
        # Redirect the file descriptors too, because libraries write to them directly.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        faulthandler.enable(file)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                result = measure(spec)
            except BaseException as error:  # a peer may raise anything, and that is a result
                traceback.print_exc()
                said = (str(error).strip().splitlines() or [""])[0]
                result = cell_of(spec, status=FAILED, said=f"{type(error).__name__}: {said}")
        faulthandler.disable()
    fresh = Path(answer).with_suffix(".part")
    fresh.write_text(json.dumps(cell_as_json(result)))
    fresh.replace(answer)


def _die_with_parent() -> None:
    """End this process with the sweep. A sweep that is killed cannot end its cell, which would keep the GPU busy. Works
    on Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def last_line(path: Path) -> str:
    """The last line of the log, before Python's own report of a fatal error."""
    if not path.exists():
        return ""
    text = path.read_text(errors="replace").partition(_FATAL)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
