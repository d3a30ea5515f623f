"""Lets Ctrl-C wait until a step is whole: an interrupted step would leave some parameters stepped and others not."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside, the first SIGINT of the main thread waits for the end. The second one is served at once.

    Other threads receive no signals, and handlers that are not functions of Python cannot be called later: there this
    does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    is_waiting = getattr(handler, "waits", False)  # for the end of the outer one
    if is_waiting or threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1:
            handler(number, frame)

    wait.waits = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(received) == 1:
            handler(*received[0])
