"""The modes of torch around what runs later than the program called it: autocast, default dtype, dispatch modes,
transforms, inference mode.

An optimizer's step that runs in the middle of a forward pass needs those of the place where the program called it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from vdnn.runtime.torch_internals.tensor_kinds import num_dispatch_modes, outside_of_transforms


class SavedModes:
    """The modes of this moment, for tensors on devices of `types`. `restored` brings them back."""

    def __init__(self, types: Iterable[str]) -> None:
        self._autocast = {kind: _autocast_of(kind) for kind in {"cpu", *types}}
        self._modes = num_dispatch_modes()
        self._default_dtype = torch.get_default_dtype()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, gradients are off. Modes that were entered since do not see what runs here."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(fewer_modes(self._modes))
            stack.enter_context(outside_of_transforms())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_default_dtype(self._default_dtype))
            for kind, (enabled, dtype) in self._autocast.items():
                if _autocast_of(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class DispatchModes:
    """The dispatch modes of this moment. Each thread has its own; threads of autograd have those of the backward."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._number = num_dispatch_modes()
        self._modes = weakref.WeakSet(_get_current_dispatch_mode_stack())

    @property
    def number_here(self) -> int:
        """How many of the modes of this thread, the outermost ones, are of that moment."""
        if threading.get_ident() == self._thread:
            return self._number
        stack = _get_current_dispatch_mode_stack()
        return next((number for number, mode in enumerate(stack) if mode not in self._modes), len(stack))

    def without_others(self) -> contextlib.AbstractContextManager[None] | None:
        """A context in which modes that were entered since do not see what runs; None if there are none."""
        if not num_dispatch_modes():  # nearly always, on a GPU
            return None
        number = self.number_here
        return fewer_modes(number) if num_dispatch_modes() > number else None


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast_of(kind: str) -> tuple[bool, torch.dtype | None]:
    try:
        enabled = torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device without autocast
        return False, None
    return enabled, torch.get_autocast_dtype(kind) if enabled else None


@contextlib.contextmanager
def fewer_modes(number: int) -> Iterator[None]:
    """Dispatch modes beyond the first `number` do not see what runs inside."""
    popped = []
    try:
        while num_dispatch_modes() > number:
            popped.append(_pop_mode())
        yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)
