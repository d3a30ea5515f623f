"""Lets saved-tensor hooks that are not a session's hold the memory that a parameter has, and not the parameter.

torch's hooks get a parameter that is saved itself: those of torch.utils.checkpoint, which holds a frozen one as it is
for its recompute, and those of a program. The data of a parameter that is streamed may be on the host again by the time
that the backward reads them, because its module has returned. So as long as somebody asks for it, hooks that are
entered get another parameter of the same memory, which they may hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_Hooks: Any = torch.autograd.graph.saved_tensors_hooks
_enter: Callable[[Any], None] = _Hooks.__enter__
_lock = threading.Lock()
_streamed: list[Callable[[torch.Tensor], bool]] = []  # of each who asks: is this parameter streamed?

Pack = Callable[[torch.Tensor], Any]


class HooksOfASession(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of a session. They get parameters themselves if the session `streams` some: it finds out which are
    its own. Otherwise they get only the memory of parameters that a session around it streams."""

    def __init__(self, pack_hook: Pack, unpack_hook: Callable[[Any], torch.Tensor], *, streams: bool) -> None:
        super().__init__(pack_hook, unpack_hook)
        if not streams and _streamed:
            self.pack_hook = _with_memory(pack_hook)

    def __enter__(self) -> None:
        _enter(self)


def give_hooks_memory(is_streamed: Callable[[torch.Tensor], bool]) -> Callable[[], None]:
    """From now on hooks of others get no parameter for which `is_streamed` is true. Returns what undoes it."""
    with _lock:
        if not _streamed:
            _Hooks.__enter__ = _enter_with_memory
        _streamed.append(is_streamed)
    is_undone = False

    def undo() -> None:
        nonlocal is_undone
        with _lock:
            if is_undone:
                return
            is_undone = True
            _streamed.remove(is_streamed)
            if not _streamed and _Hooks.__enter__ is _enter_with_memory:
                _Hooks.__enter__ = _enter

    return undo


def _enter_with_memory(hooks: Any) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(_with_memory(hooks.pack_hook), hooks.unpack_hook)


def _with_memory(pack: Pack) -> Pack:
    return lambda tensor: pack(memory_of(tensor))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or another parameter of the same memory if it is a parameter that is streamed."""
    if not isinstance(tensor, torch.nn.Parameter) or not any(is_streamed(tensor) for is_streamed in _streamed):
        return tensor
    return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, tensor.requires_grad)
