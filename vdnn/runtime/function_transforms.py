"""Lets torch.func.grad, vjp, jacrev and hessian run inside a session: there its hooks step aside.

torch.func refuses to run where saved-tensor hooks are installed, whatever they do. What it saves would pass through
anyway, so a session's hooks are disabled while such a function runs, and what is saved there stays as in plain torch.
Hooks of somebody else are refused as ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vdnn.runtime.packer import Packer

_autograd: Any = torch._C._autograd
_disable: Callable[..., None] = _autograd._saved_tensors_hooks_disable
_SAID_BY_TORCH_FUNC = "torch.func."
_IS_SUPPORTED = "fail_if_non_empty" in (_disable.__doc__ or "") and hasattr(
    _autograd, "_top_saved_tensors_default_hooks"
)
_counting = threading.Lock()
_installed = 0


@contextlib.contextmanager
def hooks_that_step_aside() -> Iterator[None]:
    """For as long as any thread is in a session."""
    if not _IS_SUPPORTED:
        yield
        return
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(more: int) -> None:
    global _installed
    with _counting:
        _installed += more
        _autograd._saved_tensors_hooks_disable = _disable_or_step_aside if _installed else _disable


def _disable_or_step_aside(error_message: str, fail_if_non_empty: bool = True) -> None:
    if fail_if_non_empty and error_message.startswith(_SAID_BY_TORCH_FUNC) and _may_step_aside():
        fail_if_non_empty = False
    _disable(error_message, fail_if_non_empty)


def _may_step_aside() -> bool:
    """Whether the innermost hooks on this thread are a session's, or have stepped aside already."""
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is not None:
        return str(message).startswith(_SAID_BY_TORCH_FUNC)
    innermost = _autograd._top_saved_tensors_default_hooks(False)
    return innermost is not None and isinstance(getattr(innermost[0], "__self__", None), Packer)
