"""Work on plans beside the training: one thread of the process does it, and the training takes up what is done.

The training never waits for it. Results are taken up between two steps, on the thread that trains, so that nothing else
is shared between the two. Where time is virtual, work is done at once: a plan would otherwise come in another step from
one run to the next.

[Note: The end of the process] Python joins no daemon thread, and one that comes back from native code while the
interpreter ends brings the process down. So the thread is ended before that, by an exception in its Python code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from vdnn.runtime.torch_internals import forks

logger = logging.getLogger("vdnn")

_Result = TypeVar("_Result")


class _Task:
    """Work that was given to the thread, and in the end its result or its error."""

    def __init__(self, make: Callable[[], Any], use: Callable[[Any], None]) -> None:
        self._make = make
        self._use = use
        self._result: Any = None
        self._error: Exception | None = None
        self.is_done = threading.Event()

    def run(self) -> None:
        try:
            self._result = self._make()
        except Exception as error:  # raised again where the training takes it up
            self._error = error
        self.is_done.set()

    def take_up(self) -> None:
        if self._error is not None:
            raise self._error
        self._use(self._result)


class _Thread:
    """The thread of this process. It begins with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._forks = forks.count
        self._thread = threading.Thread(target=self._run, name="vdnn plans", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return self._forks == forks.count

    def add(self, task: _Task) -> None:
        self._tasks.put(task)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # raised by end()
            while True:
                self._tasks.get().run()

    def end(self) -> None:
        """See [Note: The end of the process]."""
        if not self.is_here:
            return
        while self._thread.is_alive():  # the exception may meet a `finally`, and is raised again
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            self._tasks.put(_Task(lambda: None, lambda _: None))  # wakes it
            self._thread.join(timeout=0.1)


_thread: _Thread | None = None
_starting = threading.Lock()


def _thread_of_process() -> _Thread:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_here:
            _thread = _Thread()
        return _thread


class WorkBeside:
    """The work of one session. `is_awaited`: it is done at once. The other functions are called by the training."""

    def __init__(self, *, is_awaited: bool) -> None:
        self._is_awaited = is_awaited
        self._tasks: deque[_Task] = deque()
        self.waits = 0  # how often the training waited

    def add(self, make: Callable[[], _Result], use: Callable[[_Result], None]) -> None:
        """`make` runs beside the training and may touch nothing that it changes. Then `use` takes up the result."""
        if self._is_awaited:
            use(make())
            return
        task = _Task(make, use)
        self._tasks.append(task)
        _thread_of_process().add(task)

    def take_up(self) -> None:
        """Takes up what is done, in the order in which it was added. Raises what was raised there."""
        while self._tasks and self._tasks[0].is_done.is_set():
            self._tasks.popleft().take_up()

    def wait(self) -> None:
        """Takes up all work, and that which follows from it."""
        while self._tasks:
            self.waits += not self._tasks[0].is_done.is_set()
            self._tasks[0].is_done.wait()
            self.take_up()

    def forget(self) -> None:
        """Drops all results that were not taken up."""
        self._tasks.clear()
