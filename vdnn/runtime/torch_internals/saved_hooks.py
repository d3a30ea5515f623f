"""Saved-tensor hooks on this thread: which are the innermost, and how a session removes its own.

Backwards run without a session's hooks where they save nothing, see csrc/hooks/backward_calls.h. So while a session is
open, this module has its place where torch calls its engine.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from vdnn._C import BackwardCalls, drop_hooks_away
from vdnn.runtime.torch_internals.backward_inputs import run_with_inputs

_autograd: Any = torch.autograd
_native: Any = torch._C._autograd
_top = _native._top_saved_tensors_default_hooks
_count_lock = threading.Lock()
_installed = 0  # engines that are entered
_calls: BackwardCalls | None = None
_before: Callable[..., Any] | None = None  # the functions that the calls replace


def top_hooks_are(hooks: torch.autograd.graph.saved_tensors_hooks) -> bool:
    """True if these are the innermost hooks, so that leaving them removes them and no others."""
    found: object = _top(True)  # torch's stub says that it is always a pair
    return isinstance(found, tuple) and found[0] is hooks.pack_hook and found[1] is hooks.unpack_hook


def leave_hooks(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
    """Removes these, which are the innermost of a session, also inside a backward that runs without them."""
    if not drop_hooks_away(hooks.pack_hook):
        hooks.__exit__()


def let_backwards_run_without_hooks() -> Callable[[], None]:
    """Patches torch, until the returned function was called as often as this one."""
    _count(1)
    return lambda: _count(-1)


def _count(change: int) -> None:
    global _installed, _calls, _before
    with _count_lock:
        _installed += change
        now = _autograd._engine_run_backward
        if _installed and now is not _calls:
            _before = now
            _calls = BackwardCalls(
                now,
                functools.partial(run_with_inputs, now),
                _top,
                _native._push_saved_tensors_default_hooks,
                _native._pop_saved_tensors_default_hooks,
                _native._saved_tensors_hooks_is_enabled,
                _native._get_sequence_nr,
            )
            _autograd._engine_run_backward = _calls
        elif not _installed and now is _calls:  # else somebody has patched it over ours, which does nothing now
            _autograd._engine_run_backward = _before
