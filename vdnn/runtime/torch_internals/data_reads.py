"""Lets reads of `parameter.data` pass through a function of ours, as long as somebody asks for it.

`.data` is a tensor of the same memory with a version counter of its own, so nobody sees a write through it. The
attribute of torch.nn.Parameter hides torch's own, as `grad` does in gradient_reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

_native: Any = torch._C.TensorBase.data
native_data: Callable[[torch.Tensor], torch.Tensor] = _native.__get__
set_native_data: Callable[[torch.Tensor, torch.Tensor], None] = _native.__set__


class Reader(Protocol):
    """Is notified of reads of `parameter.data`."""

    def before_data_are_taken(self, parameter: torch.Tensor) -> None:
        """Called before a program gets the data of `parameter`."""


_lock = threading.Lock()
_readers: dict[int, Reader] = {}  # by id of the parameter, which its reader keeps alive


def _get(parameter: torch.Tensor) -> torch.Tensor:
    reader = _readers.get(id(parameter))
    if reader is not None:
        reader.before_data_are_taken(parameter)
    return native_data(parameter)


def watch_data(parameter: torch.Tensor, reader: Reader) -> None:
    """Calls `reader` at each read of `parameter.data`, until `watch_data_no_longer`."""
    with _lock:
        if not _readers:
            torch.nn.Parameter.data = property(_get, set_native_data)  # type: ignore[assignment]
        _readers[id(parameter)] = reader


def watch_data_no_longer(parameter: torch.Tensor) -> None:
    with _lock:
        if _readers.pop(id(parameter), None) is not None and not _readers:
            del torch.nn.Parameter.data
