"""Programs in processes of their own, forked off one process that has imported torch and vdnn.

An interpreter that imports torch, its compiler and vdnn works for two to five seconds before it begins, more than most
programs of tests take. The server of multiprocessing imports them once for each worker of pytest and runs nothing, so a
fork of it is as fresh as a new interpreter: no thread, no operation, no device.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S, Hung

IMPORTED = ["torch", "torch._dynamo", "torch.distributed", "vdnn", "vdnn.cli.main", "vdnn.advisor", "vdnn.integrations"]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program ended, in the words of subprocess."""

    returncode: int
    stdout: str
    stderr: str


def server() -> ForkServerContext:
    """The context whose processes are forks of the process with the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@dataclasses.dataclass
class Program:
    """A function that runs in a process of its own, with a working folder and files for what it prints."""

    process: Any
    output: tempfile.TemporaryDirectory[str]
    what: str

    def end(self, limit_s: float = PATIENCE_S) -> Ended:
        """Waits for the end. A program that runs past the limit prints the stacks of its threads and ends."""
        self.process.join(limit_s + 30)
        hung = self.process.is_alive()
        if hung:
            self.process.kill()
            self.process.join()
        stdout, stderr = ((Path(self.output.name) / name).read_text() for name in ("stdout", "stderr"))
        self.output.cleanup()
        if hung or "Timeout (" in stderr:
            raise Hung(self.what, limit_s, stdout[-2000:] + stderr[-6000:])
        return Ended(self.process.exitcode, stdout, stderr)


def start(
    function: Callable[..., None],
    *arguments: Any,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float = PATIENCE_S,
) -> Program:
    """Starts the function, which a module of tests has by name, in `folder`."""
    output = tempfile.TemporaryDirectory()
    inner = (function, arguments, str(folder), output.name, dict(environment or {}), limit_s)
    process = server().Process(target=_enter, args=inner)
    process.start()  # type: ignore[no-untyped-call, unused-ignore]
    return Program(process, output, getattr(function, "__name__", "a program"))


def run(function: Callable[..., None], *arguments: Any, folder: Path, **options: Any) -> Ended:
    return start(function, *arguments, folder=folder, **options).end(options.get("limit_s", PATIENCE_S))


def run_script(script: Path, *arguments: str) -> None:
    """Runs the script as `python script arguments` does. For `start` and `run`."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_module(name: str, *arguments: str) -> None:
    """Runs the module as `python -m name arguments` does. For `start` and `run`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_code(code: str, *arguments: str) -> None:
    """Runs the code as `python -c code arguments` does. For `start` and `run`."""
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _enter(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    folder: str,
    output: str,
    environment: dict[str, str],
    limit_s: float,
) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(Path(output) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    multiprocessing.set_start_method(None, force=True)  # as in a program that sets none
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    function(*arguments)
