"""Processes that form a group over gloo and run test functions together, each job under a time limit.

A job is a function of a module that every process can import, called as `function(rank, *arguments)` in each of them.
Results are returned in the order of the ranks. If one rank raises, the others get some time to notice, and those that
have not finished by then are named with the stacks of their threads, and ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import forked
from tests.patience import PATIENCE_S


class RankFailed(AssertionError):
    """A job failed. Has the message of each rank that did not finish."""

    def __init__(self, said: dict[int, str]) -> None:
        self.said = said
        super().__init__("\n".join(f"rank {rank}: {words}" for rank, words in sorted(said.items())))


class Ranks:
    """`count` processes that run jobs one after another, and no more jobs after one has failed."""

    def __init__(self, count: int = 2) -> None:
        context = forked.server()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process: Any = context.Process(target=_serve, args=(theirs, rank, count, store), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._collect(PATIENCE_S)

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = PATIENCE_S) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._collect(limit_s)

    def _collect(self, limit_s: float) -> list[Any]:
        """Collects the answer of each rank. After one has failed, the others may still answer until the limit."""
        until = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while len(answers) + len(failed) < len(self._pipes):
            waiting = {
                pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers and rank not in failed
            }
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                failed.update(
                    (rank, f"no answer after {limit_s} s\n{self._stack_of(rank)}") for rank in waiting.values()
                )
                for rank in waiting.values():
                    self.processes[rank].kill()
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    works, answer = pipe.recv()
                except EOFError:
                    works, answer = False, "the process is gone"
                if works:
                    answers[rank] = answer
                else:
                    failed[rank] = answer
        if failed:
            self.close()
            raise RankFailed(failed)
        return [answers[rank] for rank in range(len(self._pipes))]

    def _stack_of(self, rank: int) -> str:
        """Returns the stacks of the threads of a rank that hangs."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        written = _stack_file(self._folder.name, rank)
        until = time.monotonic() + 5
        while time.monotonic() < until and "in <module>" not in written.read_text():
            self.processes[rank].join(0.01)
        return written.read_text()

    @property
    def closed(self) -> bool:
        return all(pipe.closed for pipe in self._pipes)

    def close(self) -> None:
        if self.closed:
            return
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"


def _serve(pipe: multiprocessing.connection.Connection, rank: int, count: int, store: str) -> None:
    """The loop of each process. A job that raises ends its process, as it would end a program."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    stacks = _stack_file(str(Path(store).parent), rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        pipe.send((True, None))
        while (job := pipe.recv()) is not None:
            function, arguments = job
            pipe.send((True, function(rank, *arguments)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise SystemExit(1) from None
