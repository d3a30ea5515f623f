"""How long tests wait for a process, and what they say of one that hangs.

Two minutes: a machine with other work beside the tests can be ten times slower than a free one, where no process of a
test works for more than ten seconds. A test that hangs ends at this limit with the stacks of both sides in its message,
before pytest's limit for a test (pyproject.toml).
"""

from __future__ import annotations

import os
import signal
import subprocess
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE_S = 120.0


class Hung(AssertionError):
    """A process did not end within its limit. The message has its stack and the stack of the test."""

    def __init__(self, what: str, limit_s: float, its_stack: str) -> None:
        ours = "".join(traceback.format_stack()[:-2])
        super().__init__(
            f"{what} did not end within {limit_s:g} s.\nIts last output and its stack:\n{its_stack}\n"
            f"The stack of the test:\n{ours}"
        )


def run_to_its_end(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = PATIENCE_S,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs the command and returns its output. A Python process that runs past the limit is made to print the stacks of
    its threads, and it ends with all processes that it has started.
    """
    environment = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints the stacks
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        raise Hung(f"{[str(word) for word in command]}", limit_s, stdout[-2000:] + stderr[-6000:]) from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        assert done.returncode == 0, stdout[-2000:] + stderr[-4000:]
    return done
