"""Notices reads of `optimizer.state`.

`state` is an ordinary attribute of an optimizer. As long as there is a user, a property of the base class shadows it.
The value stays in the instance's dict.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_lock = threading.Lock()
_readers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], None]] = weakref.WeakKeyDictionary()
_STATE = "state"


def _get(optimizer: torch.optim.Optimizer) -> Any:
    before_read = _readers.get(optimizer)
    if before_read is not None:
        before_read()
    try:
        return vars(optimizer)[_STATE]
    except KeyError:
        raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_STATE!r}") from None


def _set(optimizer: torch.optim.Optimizer, state: Any) -> None:
    before_read = _readers.get(optimizer)
    if before_read is not None:
        before_read()
    vars(optimizer)[_STATE] = state


def _delete(optimizer: torch.optim.Optimizer) -> None:
    del vars(optimizer)[_STATE]


def watch_state(optimizer: torch.optim.Optimizer, before_read: Callable[[], None]) -> Callable[[], None]:
    """From now on `before_read` is called before `optimizer.state` is read or written. Returns a function that undoes
    this."""
    with _lock:
        if not _readers:
            torch.optim.Optimizer.state = property(_get, _set, _delete)  # type: ignore[assignment]
        _readers[optimizer] = before_read
    reference = weakref.ref(optimizer)

    def undo() -> None:
        with _lock:
            watched = reference()
            if watched is not None:
                _readers.pop(watched, None)
            if not _readers and _STATE in vars(torch.optim.Optimizer):
                delattr(torch.optim.Optimizer, _STATE)

    return undo
