"""One cell in a process of its own, with a time limit, and whatever becomes of it as a result.

On a GPU the process is a fresh one, which may be made ahead of time: it imports what it needs, touches no device, and
waits for its cell. Off it the process is forked from one that has torch imported and warm, which saves seconds a cell;
no tensor with data was made there before. A cell that raises, hangs, or dies by a signal is recorded with what it said
last; its output is in the run's `logs/`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
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

from benchmarks.harness.cell_spec import FAILED, TIMED_OUT, CellResult, CellSpec, result_of

_PR_SET_PDEATHSIG = 1
_FATAL = "Fatal Python error: "  # how faulthandler begins
Measure = Callable[[CellSpec], CellResult]


class CellProcess:
    """Begun when it is made, and waits for its cell. `measure` runs in it; the process is forked, or else begins from
    nothing."""

    def __init__(self, measure: Measure, folder: Path, *, limit_s: float, forks: bool) -> None:
        self._limit_s = limit_s
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork" if forks else "spawn")
        theirs, self._connection = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(target=wait_and_run, args=(theirs, measure))  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            # Libraries keep threads for sums of matrices, of which none was asked for yet.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._answer: Path | None = None

    def begin(self, spec: CellSpec) -> CellProcess:
        """Its limit counts from now. What cannot be sent, because the process is dead, shows when it is waited for."""
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
        """Its exit code once it is over. None: not yet."""
        self._process.join(most_s)
        return self._process.exitcode

    def wait(self, most_s: float) -> CellResult | None:
        """The result once it is there. None: not yet."""
        if self.wait_for_end(most_s) is None:
            if time.monotonic() < self._until_s:
                return None
            self.kill()
            return self._ended(TIMED_OUT, f"took longer than {self._limit_s:.0f} s and was ended")
        result = self._result()
        self.kill()  # what it may have left running
        return result

    def kill(self) -> None:
        """With all that it has begun. Does nothing to what is over."""
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

    def _result(self) -> CellResult:
        code = self._process.exitcode
        assert code is not None, "it has ended"
        assert self._answer is not None, "it was begun"
        if code < 0:
            return self._ended(FAILED, f"its process died by {_signal_name(-code)}")
        try:
            return CellResult(**json.loads(self._answer.read_text()))
        except (OSError, ValueError, TypeError) as error:
            return self._ended(FAILED, f"its process left no result ({type(error).__name__}), and ended with {code}")

    def _ended(self, status: str, said: str) -> CellResult:
        last = last_line(self._log)
        return result_of(self.spec, status=status, said=f"{said}; it said last: {last}" if last else said)


def wait_and_run(connection: Connection, measure: Measure) -> None:
    """In the new process."""
    with contextlib.suppress(OSError):
        os.setsid()  # so that it can be ended with all that it began, and Ctrl-C is the sweep's alone
    _die_with_parent()
    try:
        spec, log, answer = connection.recv()
    except EOFError:
        return  # nobody has a cell for it
    run_and_answer(spec, measure, log, answer)


def run_and_answer(spec: CellSpec, measure: Measure, log: str, answer: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with Path(log).open("w", buffering=1) as file:
        # Both what Python writes and what libraries do.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        faulthandler.enable(file)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                result = measure(spec)
            except BaseException as error:  # all that a peer may raise is a result
                traceback.print_exc()
                said = (str(error).strip().splitlines() or [""])[0]
                result = result_of(spec, status=FAILED, said=f"{type(error).__name__}: {said}")
        faulthandler.disable()
    fresh = Path(answer).with_suffix(".part")
    fresh.write_text(json.dumps(dataclasses.asdict(result)))
    fresh.replace(answer)


def _die_with_parent() -> None:
    """A sweep that is killed cannot end its cell, which would go on holding a GPU. Where there is no Linux it does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def last_line(path: Path) -> str:
    """Before Python says how it died: where it did is left to the log."""
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
