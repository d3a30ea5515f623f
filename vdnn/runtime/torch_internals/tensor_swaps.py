"""Lets a parameter be whole before torch.utils.swap_tensors takes it apart.

swap_tensors exchanges the implementations of two tensors, with their values, gradients and hooks. It asks nobody but
those who refer to a tensor weakly. While somebody asks, the function of torch.utils, which `load_state_dict()` and
`Module.to()` call too, first reads the gradient, which comes back, lets go of the guard of a parameter, and takes out
our hooks, which are those of the same parameter behind it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from vdnn.runtime.torch_internals.gradient_hooks import with_ours, without_ours
from vdnn.runtime.torch_internals.gradient_reads import holder_of
from vdnn.runtime.torch_internals.parameter_guard import ask

_utils: Any = torch.utils
_lock = threading.Lock()
_users = 0


def watch_swaps() -> Callable[[], None]:
    """From now on parameters are whole before they are swapped. Returns what undoes it."""
    global _users
    with _lock:
        if not _users:
            _utils.swap_tensors = _replacing(_utils.swap_tensors)
        _users += 1
    is_undone = False

    def undo() -> None:
        global _users
        nonlocal is_undone
        with _lock:
            if is_undone:
                return
            is_undone = True
            _users -= 1
            if not _users:
                _utils.swap_tensors = _utils.swap_tensors.__wrapped__

    return undo


def _replacing(own: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(own)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        for tensor in (t1, t2):
            holder = holder_of(tensor)
            if holder is not None:
                holder.before_read(tensor)
            ask(tensor)
        taken = without_ours(t1), without_ours(t2)
        try:
            own(t1, t2)
        finally:
            with_ours(t1, taken[0])
            with_ours(t2, taken[1])

    return swap_tensors
