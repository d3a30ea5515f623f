"""Keeps torch function modes active in backward passes.

`loss.backward()` is itself a function that a mode sees, and a mode is not active inside a function that it handles. So
the recomputes of a checkpoint in the backward pass would not pass through the mode, and would save other tensors than
the forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_autograd: Any = torch.autograd


@contextlib.contextmanager
def backward_under(modes: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """A context in which each backward pass runs inside `modes()`. Not for several threads."""
    run = _autograd._engine_run_backward

    def run_under_modes(*arguments: Any, **options: Any) -> Any:
        with modes():
            return run(*arguments, **options)

    _autograd._engine_run_backward = run_under_modes
    try:
        yield
    finally:
        _autograd._engine_run_backward = run
