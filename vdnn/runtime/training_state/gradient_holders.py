"""Asks who holds a gradient: one that only its parameter holds may leave the device.

[Note: A debugger holds locals] Up to Python 3.12 a frame keeps a second reference to its locals once a trace or
profile function has read its `f_locals`. So no function that is on the stack while this asks has had the gradient in a
variable, and counts that are too high are compared with those of a gradient that surely nobody holds, read now.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from vdnn.runtime.storage.source import natively_held
from vdnn.runtime.torch_internals.gradient_reads import native_gradient, set_native_gradient
from vdnn.runtime.torch_internals.local_shards import is_sharded, local_part


def is_held_elsewhere(parameter: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """True if anything but the native fields of `parameters` holds the gradient of one of them, or its memory."""
    if is_sharded(parameter):
        return _is_shard_held(parameter, parameters)
    counts = _counts(parameter)
    return counts is not None and not _within(counts, _HELD_ONCE) and not _within(counts, _counts_of_one_held_once())


def _is_shard_held(parameter: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """FSDP2 reduces the gradients of a module into one tensor, of which they are views that hold it."""
    gradient = native_gradient(parameter)
    if gradient is None:
        return False
    storages = [storage for one in parameters if is_sharded(one) and (storage := _storage_of_gradient(one))]
    own = _storage_of_gradient(parameter)
    holders = storages.count(own) + local_part(gradient)._is_view()
    return sys.getrefcount(gradient) > _HELD_ONCE[0] or natively_held(own) > holders + _COUNTS_ITSELF


def _storage_of_gradient(parameter: torch.Tensor) -> int:
    """The address of the storage of a gradient, 0 if there is none."""
    gradient = native_gradient(parameter)
    return 0 if gradient is None else local_part(gradient).untyped_storage()._cdata


def _counts(parameter: torch.Tensor) -> tuple[int, int] | None:
    """References to the Python object of a gradient, and to its storage."""
    gradient = native_gradient(parameter)
    if gradient is None:
        return None
    return sys.getrefcount(gradient), natively_held(gradient.untyped_storage()._cdata)


def _within(counts: tuple[int, int], most: tuple[int, int]) -> bool:
    return counts[0] <= most[0] and counts[1] <= most[1]


def _counts_of_one_held_once() -> tuple[int, int]:
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1))
        set_native_gradient(parameter, torch.zeros(1))
    counts = _counts(parameter)
    if counts is None:
        raise RuntimeError("expected the gradient that was set, got none")
    return counts


_COUNTS_ITSELF = 1  # natively_held holds the storage as well
_HELD_ONCE = _counts_of_one_held_once()
