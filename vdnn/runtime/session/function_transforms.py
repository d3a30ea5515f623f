"""Disables a session's hooks where torch cannot work with saved-tensor hooks: in torch.func's grads and in make_fx.

torch.func.grad, vjp, jacrev and hessian refuse to run while any saved-tensor hooks are installed. This module disables
the session's hooks while such a function runs, so its saves stay on the device. torch still refuses foreign hooks.
make_fx identifies tensors by identity. With hooks installed, autograd returns other tensor objects than those that were
saved, and the tracer makes constants of tensors that it does not know. So the session's hooks are removed from the
thread while make_fx traces, and installed again afterwards.

A graph that is made meanwhile holds parameters themselves. If they were on the host between calls of modules, backward
would find them there. So managed parameters return to the device before such a function runs, and stay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as _proxies
from torch._subclasses.fake_tensor import unset_fake_temporarily

from vdnn._C import Gate
from vdnn.runtime.session.hooks import Packer
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_transforms
from vdnn.runtime.training_state.parameters.packed_parameter import ParameterSaves

_autograd: Any = torch._C._autograd
_disable: Callable[..., None] = _autograd._saved_tensors_hooks_disable
_TORCH_FUNC_PREFIX = "torch.func."  # how torch.func's error messages begin
_IS_SUPPORTED = "fail_if_non_empty" in (_disable.__doc__ or "") and hasattr(
    _autograd, "_top_saved_tensors_default_hooks"
)
_set_tracer: Callable[..., Any] | None = getattr(_proxies, "_set_make_fx_tracer", None)
_count_lock = threading.Lock()
_installed = 0  # threads inside a session


def let_hooks_step_aside() -> Callable[[], None]:
    """Patches torch, until the last thread that called this has called the returned function."""
    _count(1)
    return partial(_count, -1)


def _count(change: int) -> None:
    global _installed
    if not _IS_SUPPORTED:
        return
    with _count_lock:
        _installed += change
        _autograd._saved_tensors_hooks_disable = _disable_or_step_aside if _installed else _disable
        if _set_tracer is not None:
            _proxies._set_make_fx_tracer = _step_aside_and_set_tracer if _installed else _set_tracer


def _disable_or_step_aside(error_message: str, fail_if_non_empty: bool = True) -> None:
    if fail_if_non_empty and error_message.startswith(_TORCH_FUNC_PREFIX) and _may_step_aside():
        fail_if_non_empty = False
    _disable(error_message, fail_if_non_empty)


def _may_step_aside() -> bool:
    """True if the innermost hooks on this thread are a session's, or torch.func has disabled hooks already."""
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is not None:
        return str(message).startswith(_TORCH_FUNC_PREFIX)
    hooks = _innermost_of_a_session()
    if hooks is None:
        return False
    _let_parameters_stay(hooks, "torch.func")
    return True


def _innermost_of_a_session() -> tuple[Any, Any] | None:
    """The innermost hooks on this thread, if they are a session's."""
    innermost: tuple[Any, Any] | None = _autograd._top_saved_tensors_default_hooks(False)
    if innermost is None or not isinstance(_owner_of(innermost), (Packer, Gate, ParameterSaves)):
        return None
    return innermost


def _owner_of(hooks: tuple[Any, Any]) -> object:
    return getattr(hooks[0], "__self__", None)


def _let_parameters_stay(hooks: tuple[Any, Any], name: str) -> None:
    owner = _owner_of(hooks)
    if isinstance(owner, ParameterSaves):
        with outside_of_transforms():
            owner.let_all_stay(f"{name} ran inside the session: its graphs hold parameters themselves")


@contextlib.contextmanager
def _step_aside_and_set_tracer(tracer: Any) -> Iterator[None]:
    removed: list[tuple[Any, Any]] = []
    while (hooks := _innermost_of_a_session()) is not None:
        with _without_the_modes_of(tracer):
            _let_parameters_stay(hooks, "make_fx")
        _autograd._pop_saved_tensors_default_hooks()
        removed.append(hooks)
    try:
        with _set_tracer(tracer):  # type: ignore[misc]  # not None: this function replaces it
            yield
    finally:
        for hooks in reversed(removed):
            _autograd._push_saved_tensors_default_hooks(*hooks)


@contextlib.contextmanager
def _without_the_modes_of(tracer: Any) -> Iterator[None]:
    """The tracer's modes are active already: copies of parameters are not traced."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_proxies.disable_proxy_modes_tracing())
        if getattr(tracer, "fake_tensor_mode", None) is not None:
            stack.enter_context(unset_fake_temporarily())
        yield
