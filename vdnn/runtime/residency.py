"""One storage version that leaves the device and comes back, wherever it is.

Ownership lives in the packed object: views own their managed storage, which owns the host copy and whatever is on the
device; when a graph dies, whole or in part, all of it goes with it. There is no global list that must become empty.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vdnn import _C
from vdnn.errors import DriverError
from vdnn.runtime.counters import Counters, Kept
from vdnn.runtime.holders import Label, label_text
from vdnn.runtime.source_hold import SourceHold
from vdnn.runtime.spans import in_span, span
from vdnn.runtime.transport import Transport

# torch's CPU kernels may differ in the last bit by alignment, so a reload is as aligned as the original was.
_ALIGNMENT = 64


class Residency(Enum):
    """Where the bytes are."""

    DEVICE = "on the device, and nowhere else"
    OFFLOADING = "on the device, and a copy to the host is on its way"
    HOST = "on the host"
    RELOADING = "on the host, and a copy to the device is on its way"
    RELOADED = "on the host, and a reloaded copy on the device"


class CopyObserver(Protocol):
    """Is told of every copy: when it may be made, when it was, and before the target of one back is allocated."""

    def completed(self, managed: ManagedStorage) -> None: ...

    def about_to_reload(self, managed: ManagedStorage) -> None: ...

    def gave_up_reload(self, managed: ManagedStorage) -> None: ...

    def offloaded(self, managed: ManagedStorage, copy: _C.HostCopy) -> None: ...

    def reloaded(self, managed: ManagedStorage, reload: _C.Reload) -> None: ...


class ManagedStorage:
    """The bytes [begin, begin + nbytes) of one storage at one version, wherever they are.

    `position` is its place in the order of saves. `lifetime` is its number in the step `epoch`, None when nobody
    counts. `keeps_reloaded`: a reloaded copy stays until the graph lets go, as the original would have; else until
    its last known use.
    """

    __slots__ = (
        "__weakref__",
        "_copy",
        "_hash",
        "_held_by_others",
        "_reload",
        "_reload_stream",
        "_reloaded",
        "_reloaded_address",
        "_reloaded_begin",
        "_source",
        "_unused_views",
        "address",
        "begin",
        "counters",
        "epoch",
        "is_to_leave",
        "keeps_reloaded",
        "label",
        "lifetime",
        "misalignment",
        "nbytes",
        "observer",
        "on_end",
        "position",
        "residency",
        "split",
        "stream",
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
        self.transport = transport
        self.counters = counters
        self.begin = begin
        self.nbytes = nbytes
        self.witness = witness
        self.version = witness._version
        self.residency = Residency.DEVICE
        self.stream = transport.current_stream()
        self.address = transport.address_of(storage) + begin
        self.misalignment = self.address % _ALIGNMENT
        self.position = -1
        self.label: Label | None = None
        self.lifetime: int | None = None
        self.epoch = 0
        self.observer: CopyObserver | None = None
        self.split: int | None = None  # see [Note: Siblings]
        self.is_to_leave = False  # decided; the copy may have to wait
        self.keeps_reloaded = False
        self.on_end: Callable[[], None] | None = None  # called when the graph lets go of it
        self._hash: torch.Tensor | None = None
        self._source: torch.UntypedStorage | None = storage
        self._held_by_others: StorageWeakRef | None = None
        self._copy: _C.HostCopy | None = None
        self._reload: _C.Reload | None = None
        self._reloaded: torch.UntypedStorage | None = None
        self._reloaded_begin = 0
        self._reloaded_address = 0
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
        transport = self.transport
        transport.note(self.address, self.nbytes, _C.Access.WRITE, self.stream, "producer")
        try:
            if transport.integrity is not None:
                self._hash = transport.integrity.hash(self.address, self.nbytes, self.stream)
            hold = SourceHold(self, source, self.stream)
            self._copy = in_span(
                "offload", transport.queue.offload, self.address, self.nbytes, self.stream, keepalive=hold
            )
        except MemoryError:
            self.counters.keep(Kept.HOST_FULL, self.nbytes)
            return
        except DriverError:
            self.counters.keep(Kept.REFUSED, self.nbytes)
            return
        if self._copy is None:
            self.counters.keep(Kept.HOST_FULL, self.nbytes)
            return
        if len(transport.streams) > 1:
            hold.copied = transport.queue.ready(self._copy)
        self.residency = Residency.OFFLOADING
        self.counters.storages += 1
        self.counters.storage_bytes += self.nbytes
        if self.observer is not None:
            self.observer.offloaded(self, self._copy)

    def release(self) -> None:
        """Gives up what is on the device: the original behind its copy, or what came back and was used."""
        if self.residency is Residency.RELOADED:
            self._forget_reload()
        if self.residency is Residency.OFFLOADING and self._copy is not None:
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
        return 2 if self.residency is Residency.OFFLOADING else 1

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

    def reload_early(self, *, whatever_the_window: bool = False) -> bool:
        """Issues a reload if the window has room. True if there is nothing left to do for this storage."""
        if self.residency is not Residency.HOST or self.witness._version != self.version:
            return True
        if self._source_on_device() is not None:
            return True
        transport = self.transport
        if not whatever_the_window and (transport.reload_in_flight_bytes + self.nbytes > transport.reload_window_bytes):
            return False  # also one that is larger than the window: what waits to be used is not to cost more than that
        try:
            self._issue_reload(transport.current_stream())
        except (DriverError, torch.OutOfMemoryError):
            return False  # nobody needs it yet: the use will ask again, and raise what it gets
        self.counters.prefetched_reloads += 1
        return True

    def _issue_reload(self, stream: _C.Stream) -> None:
        """The one place where a copy back is made: early or on demand, it has the same edges."""
        copy = self._copy
        assert copy is not None, "a storage on the host has a host copy"
        target = self._allocate_target()
        self._reload = in_span(
            "reload",
            self.transport.queue.reload,
            copy,
            self._reloaded_address,
            stream,
            keepalive=target,
            demand=True,
        )
        self._reloaded = target
        self._reload_stream = stream
        self._unused_views = self.views
        self.residency = Residency.RELOADING
        self.transport.reload_in_flight_bytes += self.nbytes
        self.counters.reloaded_bytes += self.nbytes
        if self.observer is not None:
            self.observer.reloaded(self, self._reload)

    def _allocate_target(self) -> torch.UntypedStorage:
        """From torch's allocator, on the current stream, as aligned as the original was."""
        if self.observer is not None:
            self.observer.about_to_reload(self)
        # Torch's allocators align to 64 bytes or more, so that this is all it takes; if one does not, there is padding.
        target = self._allocate(self.nbytes + self.misalignment)
        if not self.transport.fake and target.data_ptr() % _ALIGNMENT:
            target = self._allocate(self.nbytes + _ALIGNMENT)
        address = self.transport.address_of(target)
        self._reloaded_begin = (self.misalignment - address) % _ALIGNMENT
        self._reloaded_address = address + self._reloaded_begin
        return target

    def _allocate(self, nbytes: int) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.transport.torch_device).untyped_storage()

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
            in_span("wait for reload", self.transport.queue.wait, self._reload, stream)
            self._leave_window()
            self.residency = Residency.RELOADED
            if self._hash is not None and self.transport.integrity is not None:
                self.transport.integrity.compare(
                    label_text(self.label), self._hash, self._reloaded_address, self.nbytes, stream
                )
        storage, begin = self._reloaded, self._reloaded_begin
        assert storage is not None
        self.transport.note(self._reloaded_address, self.nbytes, _C.Access.READ, stream, "use")
        self._unused_views -= 1
        if self._unused_views <= 0 and not self.keeps_reloaded:
            # The last known use: the caller's view keeps the bytes for as long as it needs them.
            self._forget_reload()
        return storage, begin

    def forget_unused_reload(self) -> None:
        """Of a reload made early that the backward has passed by: its room is needed."""
        if self.residency is Residency.RELOADING:
            self._forget_reload()

    def _forget_reload(self) -> None:
        self._leave_window()
        if self.observer is not None and self._reloaded is not None:
            self.observer.gave_up_reload(self)
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
        if self.on_end is not None:
            self.on_end()
