"""Knows of the backward that runs on this thread, and calls a function when it ends, as DDP and FSDP do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd.function import BackwardCFunction

_NO_GRAPH_TASK = -1
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def graph_task() -> int:
    """The number of the backward that this thread runs, or -1."""
    return _graph_task()


def in_backward() -> bool:
    """True if this thread runs a backward."""
    return _graph_task() != _NO_GRAPH_TASK


def call_after_backward(function: Callable[[], None]) -> bool:
    """Returns False outside of a backward. If the backward raises, the function is not called."""
    if not in_backward():
        return False
    torch.autograd.Variable._execution_engine.queue_callback(function)
    return True


def in_nested_backward() -> bool:
    """True if a backward runs inside of an autograd function's own, as that of a reentrant checkpoint does. Also in a
    function that is called behind such a backward."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
