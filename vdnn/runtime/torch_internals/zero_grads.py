"""Is notified of calls of `zero_grad` of optimizers and modules, which read each gradient only to drop it.

A gradient that is away would come to the device to be dropped. The methods of torch's base classes are replaced while
somebody asks, so that it does not matter who calls them, or wraps the one of a single optimizer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

Drop = Callable[[Iterable[torch.Tensor]], None]

_lock = threading.Lock()
_droppers: dict[int, Drop] = {}
_ZERO_GRAD = "zero_grad"


def watch_zero_grads(drop: Drop) -> Callable[[], None]:
    """From now on `drop(parameters)` is called before the gradients of parameters are set to None: those of the groups
    that an optimizer has then, or those of a module. Returns what undoes it."""
    key = id(drop)
    with _lock:
        if not _droppers:
            _replace(torch.nn.Module, torch.nn.Module.parameters)
            _replace(torch.optim.Optimizer, _parameters_of)
        _droppers[key] = drop

    def undo() -> None:
        with _lock:
            if _droppers.pop(key, None) is not None and not _droppers:
                for kind in (torch.nn.Module, torch.optim.Optimizer):
                    setattr(kind, _ZERO_GRAD, getattr(kind, _ZERO_GRAD).__wrapped__)

    return undo


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _replace(kind: Any, parameters_of: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    own: Callable[..., None] = kind.zero_grad

    @functools.wraps(own)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            parameters = list(parameters_of(self))
            for drop in list(_droppers.values()):
                drop(parameters)
        own(self, set_to_none)

    setattr(kind, _ZERO_GRAD, zero_grad)
