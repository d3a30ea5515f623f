"""Hears of reads of `optimizer.state`, and of `Module.zero_grad`, which reads each gradient only to drop it.

`state` is an ordinary attribute of an optimizer. A property of its base class goes ahead of it; the value stays in the
instance's dict, where it was. Both are there while somebody asks.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_lock = threading.Lock()
_readers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], None]] = weakref.WeakKeyDictionary()
_droppers: dict[int, Callable[[torch.nn.Module], None]] = {}
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
    """From now on `before_read` is called before `optimizer.state` is read or written. Returns what undoes it."""
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


def watch_zero_grad(drop: Callable[[torch.nn.Module], None]) -> Callable[[], None]:
    """From now on `drop(module)` is called before a module's `zero_grad` drops gradients. Returns what undoes it."""
    key = id(drop)
    with _lock:
        if not _droppers:
            torch.nn.Module.zero_grad = _dropping(torch.nn.Module.zero_grad)  # type: ignore[method-assign]
        _droppers[key] = drop

    def undo() -> None:
        with _lock:
            if _droppers.pop(key, None) is not None and not _droppers:
                own: Any = torch.nn.Module.zero_grad
                torch.nn.Module.zero_grad = own.__wrapped__  # type: ignore[method-assign]

    return undo


def _dropping(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
        if set_to_none:
            for drop in list(_droppers.values()):
                drop(module)
        own(module, set_to_none)

    return zero_grad
