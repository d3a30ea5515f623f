"""The run-time record of one storage version: its offload, release, reload, use and discard.

Packed views own it, and it owns the host copy and the copy on the device. When a graph is freed, whole or in part, so
is all that its views own: no global list has to be emptied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vdnn import _C
from vdnn.errors import DriverError
from vdnn.runtime.storage.copy_observer import CopyObserver, Table
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.discarded import Check, Discarded, RecomputeRecipe
from vdnn.runtime.storage.geometry import Geometry, label_text
from vdnn.runtime.storage.reload_target import ALIGNMENT, ReloadTarget, allocate_target
from vdnn.runtime.storage.source_hold import SourceHold
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.spans import in_span, span


class Residency(Enum):
    """The state of a managed storage: where its bytes are."""

    DEVICE = "on the device, and nowhere else"
    OFFLOADING = "on the device, while a copy to the host is in flight or not yet waited for"
    HOST = "on the host only"
    RELOADING = "on the host, while a copy to the device is in flight"
    RELOADED = "on the host, and a complete copy on the device"
    DISCARDED = "nowhere, or recomputed on the device"


# An attribute look-up on the Enum class costs as much as a call, and hooks need these at every use.
_DEVICE, _OFFLOADING, _HOST, _RELOADING, _RELOADED, _DISCARDED = Residency


class ManagedStorage:
    """The bytes [begin, begin + nbytes) of one storage at one version.

    `position`: index in the order of saves. `lifetime`: number in the step `epoch`, None if no step is watched.
    `keeps_reloaded`: a reloaded copy stays until the graph is freed, as the original would; otherwise until its last
    known use. `geometry`: that of the first saved tensor. `is_dense`: these bytes are exactly that tensor.
    """

    __slots__ = (
        "__weakref__",
        "_copy",
        "_hash",
        "_held_by_others",
        "_reload",
        "_reload_stream",
        "_source",
        "_target",
        "_unused_views",
        "address",
        "begin",
        "container",
        "counters",
        "discarded",
        "epoch",
        "geometry",
        "has_several_dtypes",
        "is_dense",
        "is_to_leave",
        "keeps_reloaded",
        "lifetime",
        "misalignment",
        "nbytes",
        "observer",
        "on_end",
        "position",
        "reference",
        "residency",
        "saved_in",
        "split",
        "storage_handle",
        "stream",
        "table",
        "table_key",
        "transport",
        "version",
        "views",
        "witness",
    )

    def __init__(
        self,
        transport: Transport,
        counters: Counters,
        storage: torch.UntypedStorage,
        begin: int,
        nbytes: int,
        witness: torch.Tensor,
    ) -> None:
        self.table: Table | None = None  # __del__ reads these three, even if __init__ raises
        self.residency = _DEVICE
        self.on_end: Callable[[], None] | None = None  # called when the last view is freed
        self.transport = transport
        self.counters = counters
        self.begin = begin
        self.nbytes = nbytes
        self.witness = witness
        self.version = witness._version
        self.reference = weakref.ref(self)
        self.stream = transport.current_stream()
        self.address = transport.address_of(storage) + begin
        self.misalignment = self.address % ALIGNMENT
        self.position = -1
        self.geometry: Geometry | None = None
        self.is_dense = False
        self.has_several_dtypes = False  # views of more than one dtype were saved
        self.saved_in: type | None = None  # the class of the module whose forward was running
        self.table_key = (0, 0, 0)
        self.container: weakref.ref[ManagedStorage] | None = None  # a larger part that was saved later
        self.storage_handle = 0
        self.lifetime: int | None = None
        self.epoch = 0
        self.observer: CopyObserver | None = None
        self.split: int | None = None  # see [Note: Siblings]
        self.is_to_leave = False  # its offload is decided, though the copy may not be issued yet
        self.keeps_reloaded = False
        self.discarded: Discarded | None = None
        self._hash: torch.Tensor | None = None
        self._source: torch.UntypedStorage | None = storage
        self._held_by_others: StorageWeakRef | None = None
        self._copy: _C.HostCopy | None = None
        self._reload: _C.Reload | None = None
        self._target: ReloadTarget | None = None
        self._reload_stream: _C.Stream | None = None
        self._unused_views = 0  # views that have not been used since the reload
        self.views = 0

    # To the host.

    def complete(self, *, offloads: bool) -> None:
        """Called once the operation that saved it is over: its bytes may be copied from now on."""
        if self.observer is not None:
            self.observer.completed(self)
        if offloads:
            self.offload()

    def offload(self) -> None:
        """Issues the copy to the host. If it is refused, the storage stays on the device and the reason is counted."""
        source = self._source
        if source is None or self._copy is not None or self.witness._version != self.version:
            return
        transport, nbytes, stream = self.transport, self.nbytes, self.stream
        if transport.is_checked:
            transport.device.note_access(self.address, nbytes, _C.Access.WRITE, stream, "producer")
        try:
            if transport.integrity is not None:
                self._hash = transport.integrity.hash(self.address, nbytes, stream)
            hold = SourceHold(self, source)
            copy = in_span("offload", transport.queue.offload)(self.address, nbytes, stream, stream, hold)
        except MemoryError:
            self.counters.keep(Kept.HOST_FULL, nbytes)
            return
        except DriverError:
            self.counters.keep(Kept.REFUSED, nbytes)
            return
        if copy is None:
            self.counters.keep(Kept.HOST_FULL, nbytes)
            return
        self._copy = copy
        if len(transport.streams) > 1:
            hold.copied = transport.queue.ready(copy)
        self.residency = _OFFLOADING
        self.counters.storages += 1
        self.counters.storage_bytes += nbytes
        if self.observer is not None:
            self.observer.offloaded(self, copy)

    def release(self) -> None:
        """Releases the copy on the device: the original, ordered after its offload, or a reload that was used."""
        if self.residency is _RELOADED:
            self._release_reload()
        if self.residency is _OFFLOADING and self._copy is not None:
            with span("release"):
                self.transport.queue.release(self._copy)
                self.transport.drop_released()

    @property
    def source_storage(self) -> torch.UntypedStorage | None:
        """The original on the device, while this object holds it."""
        return self._source

    @property
    def source_references(self) -> int:
        """The number of references to the source that are the runtime's own."""
        return 2 if self.residency is _OFFLOADING else 1

    def source_released(self) -> None:
        """Called when the owner stream waits for the copy: from now on the bytes are on the host."""
        self._source = None
        if self.residency is _OFFLOADING:
            self.residency = _HOST

    def source_held_by_others(self, source: torch.UntypedStorage) -> None:
        """Called if the release did not free it. See [Note: A source that others hold is used]."""
        self._held_by_others = StorageWeakRef(source)  # type: ignore[no-untyped-call]

    def _source_on_device(self) -> torch.UntypedStorage | None:
        """The source, if this object or another holder keeps it alive.

        [Note: A source that others hold is used] A reload would put a second copy on the device. Writes that no version
        counter counts (through `.data` or numpy) show, as in plain PyTorch, where the graph holds the source. A source
        that its owner has shrunk is not used.
        """
        if self._source is not None or self._held_by_others is None:
            return self._source
        source: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._held_by_others.cdata)
        if source is None or source.nbytes() < self.begin + self.nbytes:
            return None
        return source

    # To the device.

    def reload_early(self) -> bool:
        """Issues a reload, even if the window is full. False if the device refused it for now."""
        if self.residency is not _HOST or self.witness._version != self.version:
            return True
        if self._held_by_others is not None and self._source_on_device() is not None:
            return True
        try:
            self._issue_reload(self.transport.current_stream())
        except (DriverError, torch.OutOfMemoryError):
            return False  # not needed yet: the use tries again, and its error is raised
        self.counters.prefetched_reloads += 1
        return True

    def _issue_reload(self, stream: _C.Stream) -> ReloadTarget:
        """Issues every reload, prefetched or on demand, so that the same events order both."""
        copy, transport = self._copy, self.transport
        if copy is None:
            raise RuntimeError(f"{label_text(self.geometry, self.saved_in)} has no host copy to reload")
        if self.observer is not None:
            self.observer.about_to_reload(self)
        geometry = self.geometry if self.is_dense else None
        target = allocate_target(transport, self.nbytes, self.misalignment, geometry)
        reload = in_span("reload", transport.queue.reload)(copy, target.address, stream, target.tensor)
        self._reload = reload
        self._target = target
        self._reload_stream = stream
        self._unused_views = self.views
        self.residency = _RELOADING
        transport.reload_in_flight_bytes += self.nbytes
        self.counters.reloaded_bytes += self.nbytes
        if self.observer is not None:
            self.observer.reloaded(self, reload)
        return target

    def use(self, geometry: Geometry) -> torch.Tensor | tuple[torch.UntypedStorage, int]:
        """The bytes on the device, ordered on the current stream: a storage and the offset of `begin` in it, or a
        tensor if the reload made one with this geometry. Does not block."""
        self.counters.uses += 1
        if self.discarded is not None:
            return self.discarded.use(self), self.begin
        source = self._source if self._held_by_others is None else self._source_on_device()
        if source is not None:
            self.counters.used_in_place += 1
            return source, self.begin
        transport = self.transport
        stream = transport.current_stream()
        if self._target is not None and (stream is self._reload_stream or stream == self._reload_stream):
            target = self._target
        else:
            # A reload serves the stream it was made for: its memory returns to that stream when it is released.
            self._release_reload()
            target = self._issue_reload(stream)
            self.counters.demand_reloads += 1
        if self.residency is _RELOADING:
            if self._reload is None:
                raise RuntimeError(f"no reload in flight for {label_text(self.geometry, self.saved_in)}")
            in_span("wait for reload", transport.queue.wait)(self._reload, stream)
            transport.reload_in_flight_bytes -= self.nbytes
            self.residency = _RELOADED
            if self._hash is not None and transport.integrity is not None:
                label = label_text(self.geometry, self.saved_in)
                transport.integrity.compare(label, self._hash, target.address, self.nbytes, stream)
        if transport.is_checked:
            transport.device.note_access(target.address, self.nbytes, _C.Access.READ, stream, "use")
        self._unused_views -= 1
        if self._unused_views <= 0 and not self.keeps_reloaded:
            # The last known use: the caller's view keeps the bytes alive as long as it needs them.
            self._release_reload()
        if target.is_whole and geometry is self.geometry:
            return target.tensor
        return target.tensor.untyped_storage(), target.begin

    @property
    def can_be_discarded(self) -> bool:
        """True if unmodified, never copied, and read on one stream only: another would have no copy to wait for."""
        is_only_on_device = self._source is not None and self._copy is None
        return is_only_on_device and self.witness._version == self.version and len(self.transport.streams) <= 1

    def discard(self, recipe: RecomputeRecipe, *, is_exact: bool, check: Check | None = None) -> bool:
        """Releases the source without a copy. False if `can_be_discarded` does not hold."""
        source = self._source
        if source is None or not self.can_be_discarded:
            return False
        self.discarded = Discarded(self, source, recipe, is_exact, check)
        self._source = None
        self.residency = _DISCARDED
        self.counters.discarded += 1
        self.counters.discarded_bytes += self.nbytes
        return True

    @property
    def is_yet_to_be_recomputed(self) -> bool:
        """True if it was discarded and not recomputed, even while another holder keeps its source alive."""
        return self.discarded is not None and self.witness._version == self.version and not self.discarded.is_recomputed

    @property
    def must_be_recomputed(self) -> bool:
        """True if its next use needs a recompute. False for a modified storage, whose use raises an error."""
        discarded = self.discarded
        return discarded is not None and self.witness._version == self.version and not discarded.is_ready(self)

    def release_unused_reload(self) -> None:
        """Releases a prefetched copy that no use has waited for."""
        if self.residency is _RELOADING:
            self._release_reload()

    def _release_reload(self) -> None:
        if self.residency is _RELOADING:
            self.transport.reload_in_flight_bytes -= self.nbytes
        if self.observer is not None and self._target is not None:
            self.observer.released_reload(self)
        self._target = None
        self._reload = None
        if self.residency is not _DEVICE:
            self.residency = _HOST

    def __del__(self) -> None:
        try:
            table, residency, on_end = self.table, self.residency, self.on_end
        except AttributeError:  # __init__ raised
            return
        if table is not None:
            table.forget(self)
        if residency is _RELOADING:  # the queue still holds the reload's target, and finishes it at the next hook
            self.transport.reload_in_flight_bytes -= self.nbytes
        if on_end is not None:
            on_end()
