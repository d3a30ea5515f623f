"""Sets the state of torch for a recompute: no graph, no autocast, no function modes, and the settings of the forward.

The previous state is restored whatever happens. Modes are left and restored natively, where no interrupt can come in
between. Settings are restored twice, because an interrupt may come between any two instructions of Python, also while
they are restored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vdnn._C import PlainRun
from vdnn.runtime.recompute.backend_flags import Flags, backend_flags, changes_to

_C: Any = torch._C
_without_modes: Callable[..., torch.Tensor] = PlainRun(
    _C._set_grad_enabled,
    torch.is_grad_enabled,
    _C._set_torch_function_state,
    _C._get_torch_function_state,
    _C._TorchFunctionState.ALL_DISABLED,
    _C._is_any_autocast_enabled,
    _C._DisableAutocast,
)


class _Chain(threading.local):
    """`present`: the settings of this thread, while a chain runs."""

    present: Flags | None = None


_chain = _Chain()


@contextmanager
def chain_of_runs() -> Iterator[None]:
    """Runs on this thread follow each other, and nothing between them changes settings, which are read once."""
    before, _chain.present = _chain.present, backend_flags()
    try:
        yield
    finally:
        _chain.present = before


def run_under(flags: Flags, run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """`run(*arguments)` without graph (and so without saves), autocast, and function modes, under `flags`."""
    present = _chain.present or backend_flags()
    if present is flags or present == flags:
        return _without_modes(run, *arguments)
    make, back = changes_to(flags)
    try:
        try:
            for change in make:
                change()
            return _without_modes(run, *arguments)
        finally:
            for change in back:
                change()
    finally:
        for change in back:
            change()
