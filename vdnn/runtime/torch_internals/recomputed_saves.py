"""Lets a recompute of torch's checkpoint save the data that a parameter has, and not the parameter.

torch.utils.checkpoint holds a tensor that a recompute saves as it is, if it needs no gradient. So it holds a frozen
parameter itself, whose data may be on the host again by the time that the backward reads them, because its module has
returned. While somebody asks, it holds a detached tensor of the same memory, as it does of what needs a gradient.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

_hook: Any = getattr(torch.utils.checkpoint, "_recomputation_hook", None)
_lock = threading.Lock()
_users = 0


def detach_saved_parameters() -> Callable[[], None]:
    """From now on recomputes hold no parameters. Returns what undoes it."""
    global _users
    if _hook is None:
        return lambda: None
    with _lock:
        if not _users:
            _hook.__init__ = _detaching(_hook.__init__)
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
                _hook.__init__ = _hook.__init__.__wrapped__

    return undo


def _detaching(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: pack(tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor)

    return __init__
