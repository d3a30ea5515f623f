"""Asks who holds a tensor and its memory, by the counts that torch and Python keep.

[Note: Counts of holders] Memory that somebody else holds does not leave the device: the holder would see no later
write, and its own writes would be lost. Each holder shows in one of these counts:

    a view, a detached tensor, a graph               torch's count of the storage
    a storage object of Python                       Python's count of that object, which we get as well when we ask
    DLPack, a graph that saved this very tensor      torch's count of the tensor
    a variable, a list, a state_dict                 Python's count of the tensor
    numpy                                            Python's count of the tensor, and the storage is not resizable
    another process                                  the storage is not resizable, and shared

[Note: A debugger holds locals] Up to Python 3.12 a frame keeps a second reference to its locals once a trace or
profile function has read its `f_locals`. So no function that is on the stack while this asks has had the tensor in a
variable, and counts that are too high are compared with those of a tensor that surely nobody holds, read now.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from vdnn.runtime.torch_internals.gradient_reads import native_gradient, set_native_gradient
from vdnn.runtime.torch_internals.local_shards import is_sharded, local_part

Get = Callable[[], torch.Tensor]

natively_held: Callable[[int], int] = torch._C._storage_Use_Count  # of a storage by its address, itself included


def _use_count_of(tensor: Any) -> int:
    """The number of references that torch holds to the tensor, its Python object included."""
    return tensor._use_count()  # type: ignore[no-any-return]


def _unknown_use_count(tensor: Any) -> int:
    return 1


_used: Callable[[Any], int] = _use_count_of if hasattr(torch.Tensor, "_use_count") else _unknown_use_count


class HolderCounts(NamedTuple):
    """Holders of a tensor and of its storage, in Python and in torch."""

    tensor: int
    native_tensor: int
    storage: int = 0
    native_storage: int = 0

    def exceed(self, most: HolderCounts, more: HolderCounts) -> bool:
        """True if any is over the same of `most` and `more` together."""
        return any(map(operator.gt, self, map(operator.add, most, more)))


NONE_MORE = HolderCounts(0, 0)


def _counts_of_tensor(get: Get) -> HolderCounts:
    tensor = get()
    return HolderCounts(sys.getrefcount(tensor), _used(tensor))


def _counts(get: Get) -> HolderCounts:
    tensor = get()
    if tensor.layout is not torch.strided:
        return HolderCounts(sys.getrefcount(tensor), _used(tensor))
    storage = tensor.untyped_storage()
    held = natively_held(storage._cdata)
    return HolderCounts(sys.getrefcount(tensor), _used(tensor), sys.getrefcount(storage), held)


def _is_within(get: Get, most: HolderCounts, more: HolderCounts) -> bool:
    """True if the counts prove that nobody holds the tensor or its memory beyond `most` and `more` together. It is `not
    counts.exceed()` in one call, because each step checks each tensor of the optimizer's state."""
    tensor = get()
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor) <= most.tensor + more.tensor
        and sys.getrefcount(storage) <= most.storage + more.storage
        and natively_held(storage._cdata) <= most.native_storage + more.native_storage
        and _used(tensor) <= most.native_tensor + more.native_tensor
        and not (tensor.is_cpu and storage.is_shared())
    )


# The counts where nobody else holds anything.


def _of_a_value() -> HolderCounts:
    with torch.inference_mode(False):
        return _counts(functools.partial(_value_of, {"alone": torch.zeros(1)}, "alone"))


def _value_of(container: Any, key: Any) -> torch.Tensor:
    return container[key]  # type: ignore[no-any-return]


def _of_a_gradient(count: Callable[[Get], HolderCounts] = _counts) -> HolderCounts:
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1))
        set_native_gradient(parameter, torch.zeros(1))
        return count(functools.partial(_gradient_of, parameter))


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = native_gradient(parameter)
    if gradient is None:
        raise RuntimeError("expected a gradient, got none")
    return gradient


_VALUE, _GRADIENT = _of_a_value(), _of_a_gradient()


# Questions.


def memory_is_held(tensor: torch.Tensor) -> bool:
    """True if anything but `tensor`, which has plain memory of its own, holds its memory: another tensor, a storage
    object, numpy, another process. Variables that hold `tensor` itself do not count: they see it when its data are
    replaced. Nor does what torch holds of it, see `is_used_natively`."""
    is_held = not _memory_is_within(tensor) and _counts_of_memory(tensor).exceed(
        _counts_of_memory(torch.zeros(1)), NONE_MORE
    )
    return is_held or not tensor.untyped_storage().resizable()


def _memory_is_within(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage) <= _VALUE.storage and natively_held(storage._cdata) <= _VALUE.native_storage


def _counts_of_memory(tensor: torch.Tensor) -> HolderCounts:
    storage = tensor.untyped_storage()
    return HolderCounts(0, 0, sys.getrefcount(storage), natively_held(storage._cdata))


def is_used_natively(tensor: torch.Tensor) -> bool:
    """True if torch holds `tensor` elsewhere than in its Python object and in the node that adds to its gradient: for
    DLPack, or because a graph saved it. Takes several microseconds for a parameter in a graph."""
    used = _used(tensor)
    if used <= 1 or not (tensor.requires_grad and tensor.is_leaf):
        return used > 1
    edge = get_gradient_edge(tensor)  # makes the node if no graph has it
    has_node_before = _used(tensor) == used
    del edge
    return used > 1 + has_node_before


def value_is_held(get: Get, known: HolderCounts = NONE_MORE) -> bool:
    """True if anything but one container in Python, from which `get` reads it, holds a tensor or its memory. `known`:
    counts of holders that may."""
    if _is_within(get, _VALUE, known):
        return False
    return _is_shared(get()) or _counts(get).exceed(_of_a_value(), known)


def wrapper_is_held(get: Get, known: HolderCounts = NONE_MORE) -> bool:
    """Like `value_is_held`, for a tensor that wraps the memory of others, such as a DTensor: only the tensor itself
    counts."""
    counts = _counts_of_tensor(get)
    return counts.exceed(_VALUE, known) and counts.exceed(_of_a_value(), known)


def _is_shared(tensor: torch.Tensor) -> bool:
    """True if other processes may have the memory."""
    is_of_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return is_of_host and tensor.untyped_storage().is_shared()


def gradient_is_held(parameter: torch.Tensor, parameters: Iterable[torch.Tensor] = ()) -> bool:
    """True if anything but the native fields of `parameter` and `parameters` holds its gradient, or the memory of that.
    False without a gradient."""
    if native_gradient(parameter) is None:
        return False
    if is_sharded(parameter):
        return _shard_is_held(parameter, parameters)
    get = functools.partial(_gradient_of, parameter)
    if _is_within(get, _GRADIENT, NONE_MORE):
        return False
    return _is_shared(get()) or _counts(get).exceed(_of_a_gradient(), NONE_MORE)


def _shard_is_held(parameter: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """FSDP2 reduces the gradients of a module into one tensor, of which they are views that hold it."""
    whole = _counts_of_tensor(functools.partial(_gradient_of, parameter))
    if whole.exceed(_GRADIENT, NONE_MORE) and whole.exceed(_of_a_gradient(_counts_of_tensor), NONE_MORE):
        return True
    own = _storage_of_gradient(parameter)
    others = sum(_storage_of_gradient(one) == own for one in parameters if is_sharded(one) and one is not parameter)
    known = HolderCounts(0, 0, 0, others + local_part(_gradient_of(parameter))._is_view())
    counts = _counts(lambda: local_part(_gradient_of(parameter)))
    return counts.exceed(_VALUE, known) and counts.exceed(_of_a_value(), known)


def _storage_of_gradient(parameter: torch.Tensor) -> int:
    """The address of the storage of a gradient, 0 if there is none."""
    gradient = native_gradient(parameter)
    return 0 if gradient is None else local_part(gradient).untyped_storage()._cdata
