"""One storage version that leaves the device and comes back, wherever it is.

Ownership lives in the packed object: views own their managed storage, which owns the host copy and whatever is on the
device; when a graph dies, whole or in part, all of it goes with it. There is no global list that must become empty.
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
    """Where the bytes are."""

    DEVICE = "on the device, and nowhere else"
    OFFLOADING = "on the device, and a copy to the host is on its way"
    HOST = "on the host"
    RELOADING = "on the host, and a copy to the device is on its way"
    RELOADED = "on the host, and a reloaded copy on the device"
    DISCARDED = "nowhere, or recomputed on the device"


# Looked up on the class anew at every use, a member would cost as much as a call.
_DEVICE, _OFFLOADING, _HOST, _RELOADING, _RELOADED, _DISCARDED = Residency


class ManagedStorage:
    """The bytes [begin, begin + nbytes) of one storage at one version, wherever they are.

    `position` is its place in the order of saves. `lifetime` is its number in the step `epoch`, None when nobody
    counts. `keeps_reloaded`: a reloaded copy stays until the graph lets go, as the original would have; else until
    its last known use. `geometry` is that of the tensor that was saved first; `is_dense`: these bytes are that tensor
    and nothing else.
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
        self.table: Table | None = None  # first what __del__ reads: an exception may end the making
        self.residency = _DEVICE
        self.on_end: Callable[[], None] | None = None  # called when the graph lets go of it
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
        self.has_several_dtypes = False  # views of it were saved as more than one
        self.saved_in: type | None = None  # the class of the module whose forward was running
        self.table_key = (0, 0, 0)
        self.container: weakref.ref[ManagedStorage] | None = None  # its bytes were saved again as a part of these
        self.storage_handle = 0
        self.lifetime: int | None = None
        self.epoch = 0
        self.observer: CopyObserver | None = None
        self.split: int | None = None  # see [Note: Siblings]
        self.is_to_leave = False  # decided; the copy may have to wait
        self.keeps_reloaded = False
        self.discarded: Discarded | None = None
        self._hash: torch.Tensor | None = None
        self._source: torch.UntypedStorage | None = storage
        self._held_by_others: StorageWeakRef | None = None
        self._copy: _C.HostCopy | None = None
        self._reload: _C.Reload | None = None
        self._target: ReloadTarget | None = None  # of the reload
        self._reload_stream: _C.Stream | None = None
        self._unused_views = 0  # views that have not been used since the reload
        self.views = 0

    # To the host.

    def complete(self, *, offloads: bool) -> None:
        """The operation that saved it is over: its bytes may be copied from now on."""
        if self.observer is not None:
            self.observer.completed(self)
        if offloads:
            self.offload()

    def offload(self) -> None:
        """Issues the copy; on refusal the storage stays where it is, counted."""
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
        """Gives up what is on the device: the original behind its copy, or what came back and was used."""
        if self.residency is _RELOADED:
            self._forget_reload()
        if self.residency is _OFFLOADING and self._copy is not None:
            with span("release"):
                self.transport.queue.release(self._copy)
                self.transport.drop_released()

    @property
    def source_storage(self) -> torch.UntypedStorage | None:
        """The original on the device, as long as this holds it."""
        return self._source

    @property
    def source_references(self) -> int:
        """How many references to it are the runtime's own."""
        return 2 if self.residency is _OFFLOADING else 1

    def source_is_gone(self) -> None:
        """Called when the owner stream waits for the copy: from now on the bytes are on the host."""
        self._source = None
        if self.residency is _OFFLOADING:
            self.residency = _HOST

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
        """Issues a reload, whatever the window. True if there is nothing left to do for this storage."""
        if self.residency is not _HOST or self.witness._version != self.version:
            return True
        if self._held_by_others is not None and self._source_on_device() is not None:
            return True
        try:
            self._issue_reload(self.transport.current_stream())
        except (DriverError, torch.OutOfMemoryError):
            return False  # nobody needs it yet: the use will ask again, and raise what it gets
        self.counters.prefetched_reloads += 1
        return True

    def _issue_reload(self, stream: _C.Stream) -> None:
        """The one place where a copy back is made: early or on demand, it has the same edges."""
        copy, transport = self._copy, self.transport
        assert copy is not None, "a storage on the host has a host copy"
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

    def use(self, geometry: Geometry) -> torch.Tensor | tuple[torch.UntypedStorage, int]:
        """A storage on the device that holds the bytes, and where in it `begin` is now; or a tensor, if they came back
        as the one of this very geometry."""
        self.counters.uses += 1
        if self.discarded is not None:
            return self.discarded.use(self), self.begin
        source = self._source if self._held_by_others is None else self._source_on_device()
        if source is not None:
            self.counters.used_in_place += 1
            return source, self.begin
        transport = self.transport
        stream = transport.current_stream()
        if self._target is None or (stream is not self._reload_stream and stream != self._reload_stream):
            # A reload serves the stream it was made for: its memory goes back to that stream when it is dropped.
            self._forget_reload()
            self._issue_reload(stream)
            self.counters.demand_reloads += 1
        target = self._target
        assert target is not None, "what is not on the device was reloaded"
        if self.residency is _RELOADING:
            assert self._reload is not None
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
            # The last known use: the caller's view keeps the bytes for as long as it needs them.
            self._forget_reload()
        if target.is_whole and geometry is self.geometry:
            return target.tensor
        return target.tensor.untyped_storage(), target.begin

    @property
    def can_be_discarded(self) -> bool:
        """Unless it is no longer what was saved, or hooks have run on several streams: another may read it yet, and
        there is no copy for it to wait for."""
        is_here = self._source is not None and self._copy is None
        return is_here and self.witness._version == self.version and len(self.transport.streams) <= 1

    def discard(self, recipe: RecomputeRecipe, *, is_exact: bool, check: Check | None = None) -> bool:
        """Gives up the source without a copy, if that can be done."""
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
        """Now, or once nobody else holds its source any more."""
        return self.discarded is not None and self.witness._version == self.version and not self.discarded.is_recomputed

    @property
    def must_be_recomputed(self) -> bool:
        """Before its next use. What was modified meanwhile is not: its use says so."""
        return self.discarded is not None and self.witness._version == self.version and not self.discarded.is_here(self)

    def forget_unused_reload(self) -> None:
        """Of a reload made early that the backward has passed by: its room is needed."""
        if self.residency is _RELOADING:
            self._forget_reload()

    def _forget_reload(self) -> None:
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
        except AttributeError:  # an exception ended its making
            return
        if table is not None:
            table.forget(self)
        # Of a reload that nobody waited for the queue still holds the target, and finishes it at the next hook.
        if residency is _RELOADING:
            self.transport.reload_in_flight_bytes -= self.nbytes
        if on_end is not None:
            on_end()
