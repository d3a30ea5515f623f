"""Copies in compiled graphs: operators that offload a value in forward and reload it in backward, over the own queue.

    host = vdnn::offload(x)               issues the copy to the host, and returns at once
    host = vdnn::wait(host, x)            the stream waits for the copy; x may be freed from here on
    y = vdnn::reload(host, device)        issues the copy back, into memory of torch's allocator
    y = vdnn::wait(y, host)               the stream waits for the copy

The host tensor holds its pinned memory, for as long as the graph or anybody else holds it: backward may run again, and
a graph that dies without a backward frees it. On the CPU a simulated device copies. If no memory can be pinned, a value
is copied to ordinary memory, and the program is warned once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from typing import Any, NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.storage.transport import Transport, TransportOptions
from vdnn.user_warnings import warn

_NO_LIMIT_BYTES = 1 << 62


class _HeldCopy:
    """A copy on the host. The memory of its tensor holds it, and it is found by the address of that memory."""

    __slots__ = ("__weakref__", "copy", "nbytes", "transport")

    def __init__(self, copy: _C.HostCopy, nbytes: int, transport: Transport) -> None:
        self.copy, self.nbytes, self.transport = copy, nbytes, transport


class _CopySource:
    """Holds a value on the device until the queue has copied it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def release(self) -> None:
        """Drops the value."""
        self.tensor = None


class _Reloading(NamedTuple):
    reload: _C.Reload
    transport: Transport


_lock = threading.RLock()
_held: weakref.WeakValueDictionary[int, _HeldCopy] = weakref.WeakValueDictionary()
_reloading: dict[int, _Reloading] = {}


@functools.cache
def _transport_of(device: torch.device, _process: int) -> Transport:
    native = _C.CudaDevice(device.index or 0) if device.type == "cuda" else _C.SimDevice()
    # The waits in the graph bound the copies in flight.
    return Transport(device, native, TransportOptions(offload_window_bytes=_NO_LIMIT_BYTES), owns_device=True)


def transport_for(device: torch.device) -> Transport:
    """The transport of all compiled graphs on `device`. A forked child has one of its own."""
    return _transport_of(device, os.getpid())


@functools.cache
def _warn_of_pageable_memory(_process: int) -> None:
    warn("no more host memory can be pinned: values of compiled graphs are copied to ordinary memory, which is slow.")


def extent_bytes(tensor: torch.Tensor) -> Any:
    """The bytes from the first element of `tensor` to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def copies() -> list[int]:
    """The addresses of the copies that are held."""
    return list(_held)


def is_on_host(tensor: torch.Tensor) -> bool:
    """True if the memory of `tensor` is that of a copy made here."""
    return tensor.device.type == "cpu" and tensor.data_ptr() in _held


@torch.library.custom_op("vdnn::offload", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def offload(value: torch.Tensor) -> torch.Tensor:
    """The value on the host, in the same strides. Its bytes are there once vdnn::wait has been called."""
    nbytes = extent_bytes(value)
    if not nbytes:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    with _lock:
        transport = transport_for(value.device)
        stream = transport.current_stream()
        transport.release_sources()
        try:
            copy = transport.queue.offload(value.data_ptr(), nbytes, stream, stream, _CopySource(value))
        except MemoryError:
            copy = None
        if copy is None:
            _warn_of_pageable_memory(os.getpid())
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").copy_(value)
        memory = (ctypes.c_char * nbytes).from_address(copy.block.address)
        memory.held = held = _HeldCopy(copy, nbytes, transport)
        _held[copy.block.address] = held
    # Of bytes first: some dtypes are not read from buffers.
    return torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype).as_strided(value.shape, value.stride())


@offload.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


@torch.library.custom_op("vdnn::reload", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The value on `device` again, in the same strides. Its bytes are there once vdnn::wait has been called."""
    value = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    with _lock:
        held = _held.get(host.data_ptr()) if host.numel() else None
        if held is None or held.nbytes != extent_bytes(host):
            return value.copy_(host)
        transport = held.transport
        stream = transport.current_stream()
        copy = transport.queue.reload(held.copy, value.data_ptr(), stream, value)
        _reloading[value.data_ptr()] = _Reloading(copy, transport)
    return value


@reload.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


_library: Any = torch.library.Library("vdnn", "FRAGMENT")  # type: ignore[no-untyped-call]
# The result is the first argument itself, which an operator of torch.library.custom_op may not return.
_library.define("wait(Tensor(a) copied, Tensor source) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))


def _wait(copied: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    with _lock:
        if not copied.numel():
            return copied
        reloading = _reloading.pop(copied.data_ptr(), None)
        if reloading is not None:
            transport = reloading.transport
            transport.queue.wait(reloading.reload, transport.current_stream())
            return copied
        held = _held.get(copied.data_ptr())
        if held is not None:
            if not held.transport.queue.release(held.copy):
                copied.copy_(source)  # the copy engine failed
            held.transport.release_sources()
    return copied


_library.impl("wait", _wait, "CompositeExplicitAutograd")
torch.library.register_fake("vdnn::wait", lambda copied, source: copied)
torch.fx.node.has_side_effect(torch.ops.vdnn.wait.default)
