"""One storage version that leaves the device and comes back, and the views of it that autograd holds.

Ownership lives in the packed object: views own their managed storage, which owns the host copy and whatever is on the
device; when a graph dies, whole or in part, all of it goes with it. There is no global list that must become empty.
"""

from __future__ import annotations

import sys
import weakref
from enum import Enum
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vdnn import _C
from vdnn.errors import DriverError
from vdnn.runtime.counters import Counters, Kept
from vdnn.runtime.transport import Transport
from vdnn.runtime.version_check import raise_modified

# torch's CPU kernels may differ in the last bit by alignment, so a reload is as aligned as the original was.
_ALIGNMENT = 64


def _count_of_one() -> int:
    """What sys.getrefcount says of an object that one local variable holds: 2, or 1 from Python 3.14 on."""
    alone = object()
    return sys.getrefcount(alone)


_HELD_ONCE = _count_of_one()


class Residency(Enum):
    """Where the bytes are."""

    DEVICE = "on the device, and nowhere else"
    OFFLOADING = "on the device, and a copy to the host is on its way"
    HOST = "on the host"
    RELOADING = "on the host, and a copy to the device is on its way"
    RELOADED = "on the host, and a reloaded copy on the device"


class SourceHold:
    """Keeps a source storage alive while a copy reads it; says so when it goes."""

    __slots__ = ("__weakref__", "_counters", "_device", "_managed", "_range", "_storage", "_stream")

    def __init__(self, managed: ManagedStorage, storage: torch.UntypedStorage, stream: _C.Stream) -> None:
        self._managed = weakref.ref(managed)
        self._storage: torch.UntypedStorage | None = storage
        self._stream = stream
        # Not the transport: its queue holds us, and no collector sees that cycle.
        self._device = managed.transport.device
        self._counters = managed.counters
        self._range = (storage.data_ptr() + managed.begin, managed.nbytes)

    def dropped(self) -> None:
        managed = self._managed()
        if managed is not None:
            managed.source_is_gone()
        storage, self._storage = self._storage, None
        if storage is None:
            return
        address, nbytes = self._range
        if torch._C._storage_Use_Count(storage._cdata) > 1 or sys.getrefcount(storage) > _HELD_ONCE:
            # Somebody else holds it (the model, an optimizer, a cache, a second save of it at another version, which
            # shares the Python object): it was copied and will not be freed.
            self._counters.copied_not_freed_bytes += nbytes
            if managed is not None:
                managed.source_stays(storage)
            return
        self._counters.freed_bytes += nbytes
        self._device.note_access(address, nbytes, _C.Access.RELEASE, self._stream, "storage dropped")


class ManagedStorage:
    """The bytes [begin, begin + nbytes) of one storage at one version, wherever they are."""

    def __init__(
        self,
        transport: Transport,
        counters: Counters,
        storage: torch.UntypedStorage,
        begin: int,
        nbytes: int,
        witness: torch.Tensor,
    ) -> None:
        self.transport = transport
        self.counters = counters
        self.begin = begin
        self.nbytes = nbytes
        self.witness = witness
        self.version = witness._version
        self.residency = Residency.DEVICE
        self.stream = transport.current_stream()
        self.misalignment = (storage.data_ptr() + begin) % _ALIGNMENT
        self._source: torch.UntypedStorage | None = storage
        self._held_by_others: StorageWeakRef | None = None
        self._copy: _C.HostCopy | None = None
        self._reload: _C.Reload | None = None
        self._reloaded: torch.UntypedStorage | None = None
        self._reloaded_begin = 0
        self._reload_stream: _C.Stream | None = None
        self._unused_views = 0  # views that have not been used since the reload
        self.views = 0

    def check_version(self, kind: str, shape: tuple[int, ...]) -> None:
        if self.witness._version != self.version:
            raise_modified(kind, shape, self.witness._version, self.version)

    # To the host.

    def offload(self) -> None:
        """Issues the copy; on refusal the storage stays where it is, counted."""
        source = self._source
        if source is None or self._copy is not None or self.witness._version != self.version:
            return
        queue = self.transport.queue
        address = source.data_ptr() + self.begin
        self.transport.device.note_access(address, self.nbytes, _C.Access.WRITE, self.stream, "producer")
        try:
            hold = SourceHold(self, source, self.stream)
            self._copy = queue.offload(address, self.nbytes, self.stream, keepalive=hold)
        except MemoryError:
            self.counters.keep(Kept.HOST_FULL, self.nbytes)
            return
        except DriverError:
            self.counters.keep(Kept.REFUSED, self.nbytes)
            return
        if self._copy is None:
            self.counters.keep(Kept.HOST_FULL, self.nbytes)
            return
        self.residency = Residency.OFFLOADING
        self.counters.storages += 1
        self.counters.storage_bytes += self.nbytes

    def source_is_gone(self) -> None:
        """Called when the owner stream waits for the copy: from now on the bytes are on the host."""
        self._source = None
        if self.residency is Residency.OFFLOADING:
            self.residency = Residency.HOST

    def source_stays(self, source: torch.UntypedStorage) -> None:
        """Somebody else holds the source. See [Note: A source that others hold is used]."""
        self._held_by_others = StorageWeakRef(source)  # type: ignore[no-untyped-call]

    def _source_on_device(self) -> torch.UntypedStorage | None:
        """The source: ours, or as long as others hold it, theirs.

        [Note: A source that others hold is used] A reload would double it, and writes that no version counter shows
        (through `.data` or numpy) are seen as in plain PyTorch, where the graph holds the source itself. One that its
        owner has shrunk is of no use.
        """
        if self._source is not None or self._held_by_others is None:
            return self._source
        source: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._held_by_others.cdata)
        if source is None or source.nbytes() < self.begin + self.nbytes:
            return None
        return source

    # Back to the device.

    def reload_early(self) -> bool:
        """Issues a reload if the window has room. True if there is nothing left to do for this storage."""
        if self.residency is not Residency.HOST or self.witness._version != self.version:
            return True
        if self._source_on_device() is not None:
            return True
        transport = self.transport
        in_flight = transport.reload_in_flight_bytes
        if in_flight and in_flight + self.nbytes > transport.reload_window_bytes:
            return False
        try:
            self._issue_reload(transport.current_stream())
        except (DriverError, torch.OutOfMemoryError):
            return False  # nobody needs it yet: the use will ask again, and raise what it gets
        self.counters.prefetched_reloads += 1
        return True

    def _issue_reload(self, stream: _C.Stream) -> None:
        """The one place where a copy back is made: early or on demand, it has the same edges."""
        target = self._allocate_target()
        copy = self._copy
        assert copy is not None, "a storage on the host has a host copy"
        self._reload = self.transport.queue.reload(
            copy, target.data_ptr() + self._reloaded_begin, stream, keepalive=target, demand=True
        )
        self._reloaded = target
        self._reload_stream = stream
        self._unused_views = self.views
        self.residency = Residency.RELOADING
        self.transport.reload_in_flight_bytes += self.nbytes
        self.counters.reloaded_bytes += self.nbytes

    def _allocate_target(self) -> torch.UntypedStorage:
        """From torch's allocator, on the current stream, as aligned as the original was."""
        with torch.no_grad():
            target = torch.empty(
                self.nbytes + _ALIGNMENT, dtype=torch.uint8, device=self.transport.torch_device
            ).untyped_storage()
        self._reloaded_begin = (self.misalignment - target.data_ptr()) % _ALIGNMENT
        return target

    def use(self) -> tuple[torch.UntypedStorage, int]:
        """A storage on the device that holds the bytes, and where in it `begin` is now."""
        self.counters.uses += 1
        source = self._source_on_device()
        if source is not None:
            self.counters.used_in_place += 1
            return source, self.begin
        stream = self.transport.current_stream()
        if self._reloaded is None or stream != self._reload_stream:
            # A reload serves the stream it was made for: its memory goes back to that stream when it is dropped.
            self._forget_reload()
            self._issue_reload(stream)
            self.counters.demand_reloads += 1
        if self.residency is Residency.RELOADING:
            assert self._reload is not None
            self.transport.queue.wait(self._reload, stream)
            self._leave_window()
            self.residency = Residency.RELOADED
        storage, begin = self._reloaded, self._reloaded_begin
        assert storage is not None
        self.transport.device.note_access(storage.data_ptr() + begin, self.nbytes, _C.Access.READ, stream, "use")
        self._unused_views -= 1
        if self._unused_views <= 0:
            # The last known use: the caller's view keeps the bytes for as long as it needs them.
            self._forget_reload()
        return storage, begin

    def _forget_reload(self) -> None:
        self._leave_window()
        self._reloaded = None
        self._reload = None
        if self.residency is not Residency.DEVICE:
            self.residency = Residency.HOST

    def _leave_window(self) -> None:
        if self.residency is Residency.RELOADING:
            self.transport.reload_in_flight_bytes -= self.nbytes

    def __del__(self) -> None:
        # Of a reload that nobody waited for the queue still holds the target, and finishes it at the next hook.
        self._leave_window()


class PackedView:
    """What autograd holds instead of a tensor: which bytes of which storage, and how they were shaped."""

    __slots__ = ("_conj", "_dtype", "_kind", "_neg", "_offset_bytes", "_size", "_stride", "managed")

    def __init__(self, managed: ManagedStorage, tensor: torch.Tensor) -> None:
        self.managed = managed
        self._conj = tensor.is_conj()
        self._neg = tensor.is_neg()
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset_bytes = int(tensor.storage_offset()) * tensor.itemsize - managed.begin
        self._kind = tensor.type()
        managed.views += 1

    def unpack(self) -> torch.Tensor:
        managed = self.managed
        managed.check_version(self._kind, tuple(self._size))
        storage, begin = managed.use()
        # Under create_graph this runs with grad mode on, and our own hooks would fire.
        with torch.no_grad():
            tensor = _view_of(storage, begin + self._offset_bytes, self._dtype, self._size, self._stride)
            if self._conj:
                tensor = torch._conj(tensor)
            if self._neg:
                tensor = torch._neg_view(tensor)
        return tensor

    def __del__(self) -> None:
        self.managed.views -= 1


def _view_of(storage: torch.UntypedStorage, begin: int, dtype: torch.dtype, size: Any, stride: Any) -> torch.Tensor:
    offset, rest = divmod(begin, dtype.itemsize)
    if rest:
        raise RuntimeError(f"a reload of {dtype} at byte {begin} is not aligned to its {dtype.itemsize} bytes")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
