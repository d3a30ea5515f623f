"""Where a session's hooks step aside, so that torch does what it does without them: in functions of torch.func that
differentiate, and under make_fx.

torch.func.grad, vjp, jacrev and hessian refuse to run where saved-tensor hooks are installed, whatever they do. A
session's are disabled while such a function runs: what is saved there stays. Hooks of somebody else are refused as
ever. A tracer of make_fx knows tensors by identity, and with hooks, whatever they return, autograd hands out others
than those that were saved: what the tracer does not know becomes a constant of its program. So a session's hooks are
taken off this thread while a program is traced, and installed again behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as _proxies

from vdnn.runtime.session.hooks import Packer

_autograd: Any = torch._C._autograd
_disable: Callable[..., None] = _autograd._saved_tensors_hooks_disable
_SAID_BY_TORCH_FUNC = "torch.func."
_IS_SUPPORTED = "fail_if_non_empty" in (_disable.__doc__ or "") and hasattr(
    _autograd, "_top_saved_tensors_default_hooks"
)
_set_tracer: Callable[..., Any] | None = getattr(_proxies, "_set_make_fx_tracer", None)
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
        if _set_tracer is not None:
            _proxies._set_make_fx_tracer = _step_aside_and_set_tracer if _installed else _set_tracer


def _disable_or_step_aside(error_message: str, fail_if_non_empty: bool = True) -> None:
    if fail_if_non_empty and error_message.startswith(_SAID_BY_TORCH_FUNC) and _may_step_aside():
        fail_if_non_empty = False
    _disable(error_message, fail_if_non_empty)


def _may_step_aside() -> bool:
    """Whether the innermost hooks on this thread are a session's, or have stepped aside already."""
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is not None:
        return str(message).startswith(_SAID_BY_TORCH_FUNC)
    return _innermost_of_a_session() is not None


def _innermost_of_a_session() -> tuple[Any, Any] | None:
    """The innermost hooks on this thread, if they are a session's."""
    innermost: tuple[Any, Any] | None = _autograd._top_saved_tensors_default_hooks(False)
    if innermost is None or not isinstance(getattr(innermost[0], "__self__", None), Packer):
        return None
    return innermost


@contextlib.contextmanager
def _step_aside_and_set_tracer(tracer: Any) -> Iterator[None]:
    aside: list[tuple[Any, Any]] = []
    while (hooks := _innermost_of_a_session()) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        aside.append(hooks)
    try:
        with _set_tracer(tracer):  # type: ignore[misc]  # there is one: this stands in for it
            yield
    finally:
        for hooks in reversed(aside):
            _autograd._push_saved_tensors_default_hooks(*hooks)
