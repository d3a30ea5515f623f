"""Calls a function when the running backward ends, as DDP and FSDP do."""

from __future__ import annotations

from collections.abc import Callable

import torch

_NO_GRAPH_TASK = -1


def call_after_backward(function: Callable[[], None]) -> bool:
    """Returns False outside of a backward. If the backward raises, the function is not called."""
    if torch._C._current_graph_task_id() == _NO_GRAPH_TASK:
        return False
    torch.autograd.Variable._execution_engine.queue_callback(function)
    return True
