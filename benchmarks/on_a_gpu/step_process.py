"""Runs one step of gpu-proof as a process: in a session of its own, with a time limit, and its output in a log file.

The process writes to the log itself, so the log has all that it said whenever and however it ends. A process that runs
past its limit is told to say where it is (Python's faulthandler, by SIGABRT), and then killed with all that it started.
The standard library is all that this needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.2
# For a process to say where it is, and for one that is asked to end.
GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process ended. `code` is negative for a signal, and None if it was killed at its limit."""

    code: int | None
    took_s: float
    log: Path

    @property
    def is_good(self) -> bool:
        return self.code == 0

    def said(self, limit_s: float) -> str:
        if self.code is None:
            return f"ran past its {limit_s:.0f} s and was ended"
        return "" if self.code == 0 else f"exit code {self.code}" if self.code > 0 else f"died by signal {-self.code}"


def run_step(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    looked: Callable[[], None] = lambda: None,
) -> Ended:
    """Run the command until it ends or reaches its limit. `looked` is called several times a second meanwhile, and once
    at the end. Whatever it or a signal raises, the process does not outlive this call."""
    began_s = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            code = _wait(process, began_s + limit_s, looked)
        finally:
            _kill_group(process)
    looked()
    return Ended(code, time.monotonic() - began_s, log)


def _wait(process: subprocess.Popen[bytes], until_s: float, looked: Callable[[], None]) -> int | None:
    while time.monotonic() < until_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOK_S, max(until_s - time.monotonic(), 0.0)))
        looked()
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    return None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and its children, which would keep the GPU busy."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with_parent() -> None:
    """Runs in the new process: it ends with this one, even if this one is killed. Works on Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def last_lines(log: Path, lines: int = 40, letters: int = 3000) -> str:
    """The end of a log. Long ones are not read whole."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4 * letters))
        text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-lines:])[-letters:]
