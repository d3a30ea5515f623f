"""The run-time record of one storage version: its offload, release, reload, use and discard.

Packed views own it, and it owns the host copy and the copy on the device. When a graph is freed, whole or in part, so
is all that its views own: no global list has to be emptied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from vdnn import _C
from vdnn.errors import DriverError
from vdnn.runtime.storage.discarded import Discarded, RecomputeCheck, RecomputeRecipe
from vdnn.runtime.storage.facts import Geometry, StorageFacts
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.reloaded import Reloaded
from vdnn.runtime.storage.source import Source
from vdnn.runtime.storage.table import TableEntry
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.storage.watched_lifetime import WatchedLifetime
from vdnn.runtime.torch_internals.spans import span
from vdnn.step.plan import Action


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
_KEEP, _OFFLOAD, *_ = Action


class ManagedStorage:
    """The bytes [begin, begin + nbytes) of one storage at one version, which `facts` describe.

    `witness` shares the version counter of the saved tensor. `action`: what was decided for the bytes, though the copy
    may not be issued yet. `views`: how many packed views and recipes use it. Three fields belong to others: `entry`
    and `reload_entry` to the table, and `position`, in the order of saves, to the Lookahead. Its parts are
    written here only.
    """

    __slots__ = (
        "__weakref__",
        "_keeps_reloaded",
        "action",
        "copy",
        "discarded",
        "entry",
        "facts",
        "has_several_dtypes",
        "is_complete",
        "nbytes",
        "position",
        "reference",
        "reload_entry",
        "reloaded",
        "saved_bytes",
        "source",
        "transport",
        "version",
        "views",
        "watched",
        "witness",
    )

    def __init__(
        self, transport: Transport, storage: torch.UntypedStorage | None, facts: StorageFacts, witness: torch.Tensor
    ) -> None:
        self.entry: TableEntry[ManagedStorage] | None = None  # __del__ reads these, even if __init__ raises
        self.reload_entry: TableEntry[ManagedStorage] | None = None
        self.watched: WatchedLifetime | None = None
        self.reloaded: Reloaded | None = None
        self.transport = transport
        self.facts = facts
        self.nbytes = facts.nbytes
        self.witness = witness
        self.version = witness._version
        self.reference = weakref.ref(self)
        self.action = _KEEP
        self.position = -1
        self.views = 0
        self.saved_bytes: tuple[int, int] | None = None  # first and end, in its storage; None: all of them
        self.is_complete = False  # the operation that saved it is over
        self.has_several_dtypes = False  # views of more than one dtype were saved
        self.discarded: Discarded | None = None
        self._keeps_reloaded = False
        self.source = Source(storage, facts, transport.release_context)
        self.copy: _C.HostCopy | None = None

    @property
    def residency(self) -> Residency:
        reloaded = self.reloaded
        if reloaded is not None:
            return _RELOADED if reloaded.is_waited_for else _RELOADING
        if self.copy is not None:
            return _HOST if self.source.storage is None else _OFFLOADING
        return _DEVICE if self.discarded is None else _DISCARDED

    @property
    def native_address(self) -> int:
        """The address of the storage's native object; 0 if no save of the program has these bytes."""
        return 0 if self.entry is None else self.entry.key[0]

    @property
    def container(self) -> ManagedStorage | None:
        """A larger part of the storage, saved later, that contains these bytes."""
        container = None if self.entry is None else self.entry.container
        return None if container is None else container()

    @property
    def is_on_device(self) -> bool:
        return self.reloaded is not None or self.source.storage is not None

    @property
    def can_be_evicted(self) -> bool:
        """True if an offload would free its memory."""
        is_unmodified = self.witness._version == self.version
        return is_unmodified and self.source.storage is not None and not self.source.is_held_by_others

    # Its users and what they decide.

    def watch(self, watched: WatchedLifetime) -> None:
        """Lets the observer of `watched` follow the copies from now on."""
        self.watched = watched

    def keep_reloaded(self) -> None:
        """From now on a reloaded copy stays until the graph is freed, as the original would. Otherwise it stays until
        its last known use."""
        self._keeps_reloaded = True

    def saved_as_another_dtype(self) -> None:
        self.has_several_dtypes = True

    def resume(self, version: int, copy: _C.HostCopy | None, reloaded: Reloaded | None) -> None:
        """It was light until now: the native gate has offloaded it at this version."""
        self.action, self.is_complete = _OFFLOAD, copy is not None
        self.version, self.copy, self.reloaded = version, copy, reloaded

    def resume_discarded(
        self, version: int, counted: _C.CountedRecipe, storage: torch.UntypedStorage | None, unused_views: int
    ) -> None:
        """The same for a storage that the gate has discarded. `storage`: its recomputed bytes, if they exist."""
        self.action, self.is_complete, self.version = Action.RECOMPUTE, True, version
        self.discarded = Discarded(self.facts, self.source, self.transport, counted)
        if storage is not None:
            self.discarded.resume(storage, unused_views)

    # To the host.

    def complete(self) -> None:
        """Called once the operation that saved it is over: its bytes may be copied from now on.

        If the copy is refused, the storage stays on the device and the reason is counted.
        """
        watched, source = self.watched, self.source
        self.is_complete = True
        if watched is not None:
            watched.observer.completed(watched)
        if self.action is not _OFFLOAD or source.storage is None or self.copy is not None:
            return
        if self.witness._version == self.version:
            self.copy = source.offload(self.transport)
            if self.copy is None:
                if watched is not None:
                    watched.observer.refused(watched, self.nbytes)
                return
            self.transport.copied.append(self.reference)
            if watched is not None:
                watched.observer.offloaded(watched, self.transport, self.copy)

    def release(self) -> None:
        """Releases the copy on the device: the original, ordered after its offload, or a reload that was used."""
        if self.reloaded is not None and self.reloaded.is_waited_for:
            self._release_reload()
        if self.copy is not None and self.source.storage is not None:
            with span("release"):
                self.transport.queue.release(self.copy)
                self.transport.release_sources()

    # To the device.

    def reload_early(self) -> bool:
        """Issues a reload, even if the window is full. False if the device refused it for now."""
        source = self.source
        if self.copy is None or source.storage is not None or self.reloaded is not None:
            return True
        if self.witness._version != self.version or (source.others is not None and source.on_device() is not None):
            return True
        try:
            self._issue_reload(self.transport.current_stream())
        except (DriverError, torch.OutOfMemoryError):
            return False  # not needed yet: the use tries again, and its error is raised
        self.facts.counters.prefetched_reloads += 1
        if self.watched is not None:
            self.watched.observer.reloaded_ahead(self.watched)
        return True

    def _issue_reload(self, stream: _C.Stream) -> Reloaded:
        copy, transport = self.copy, self.transport
        if copy is None:
            raise RuntimeError(f"{self.facts.label} has no host copy to reload")
        if self.watched is not None:
            self.watched.observer.about_to_reload(self.watched)
        transport.release_context.changes += 1
        reloaded = self.reloaded = Reloaded(transport, copy, self.facts, stream, self.views)
        self.facts.counters.reloaded_bytes += self.nbytes
        if self.watched is not None:
            self.watched.observer.reloaded(self.watched, reloaded.copy)
        return reloaded

    def use(self, geometry: Geometry) -> torch.Tensor | tuple[torch.UntypedStorage, int]:
        """The bytes on the device, ordered on the current stream: a storage and the offset of the bytes in it, or a
        tensor if the reload made one with this geometry. Does not block."""
        facts = self.facts
        counters = facts.counters
        counters.uses += 1
        if self.discarded is not None:
            return self._use_discarded(self.discarded), facts.begin
        source = self.source
        storage = source.storage if source.others is None else source.on_device()
        if storage is not None:
            counters.used_in_place += 1
            return storage, facts.begin
        transport = self.transport
        stream = transport.current_stream()
        reloaded = self.reloaded
        if reloaded is None or (stream is not reloaded.stream and stream != reloaded.stream):
            # A reload serves the stream it was made for: its memory returns to that stream when it is released.
            self._release_reload()
            reloaded = self._issue_reload(stream)
            counters.demand_reloads += 1
        if not reloaded.is_waited_for:
            reloaded.wait()
            if self.source.hash is not None and transport.integrity is not None:
                transport.integrity.compare(facts.label, self.source.hash, reloaded.address, self.nbytes, stream)
        if transport.is_checked:
            transport.device.note_access(reloaded.address, self.nbytes, _C.Access.READ, stream, "use")
        reloaded.unused_views -= 1
        if reloaded.unused_views <= 0 and not self._keeps_reloaded:
            # The last known use: the caller's view keeps the bytes alive as long as it needs them.
            self._release_reload()
        if reloaded.is_whole and geometry is facts.geometry:
            return reloaded.tensor
        return reloaded.tensor.untyped_storage(), reloaded.begin

    def release_unused_reload(self) -> None:
        """Releases a prefetched copy that no use has waited for."""
        if self.reloaded is not None and not self.reloaded.is_waited_for:
            self._release_reload()

    def _release_reload(self) -> None:
        if self.reloaded is None:
            return
        self.transport.release_context.changes += 1
        if self.watched is not None:
            self.watched.observer.released_reload(self.watched)
        self.reloaded = None

    # Discarded and recomputed.

    @property
    def can_be_discarded(self) -> bool:
        """True if unmodified, never copied, and read on one stream only: another would have no copy to wait for."""
        is_only_on_device = self.source.storage is not None and self.copy is None
        return is_only_on_device and self.witness._version == self.version and len(self.transport.streams) <= 1

    def discard(self, recipe: RecomputeRecipe, *, is_exact: bool, check: RecomputeCheck | None = None) -> bool:
        """Releases the source without a copy. False if `can_be_discarded` does not hold."""
        if not self.can_be_discarded:
            return False
        counted = _C.CountedRecipe(recipe)
        self.discarded = Discarded(self.facts, self.source, self.transport, counted, is_exact, check)
        self.facts.counters.discarded += 1
        self.facts.counters.discarded_bytes += self.nbytes
        return True

    @property
    def is_yet_to_be_recomputed(self) -> bool:
        """True if it was discarded and not recomputed, even while another holder keeps its source alive."""
        return self.discarded is not None and self.witness._version == self.version and not self.discarded.is_recomputed

    @property
    def must_be_recomputed(self) -> bool:
        """True if its next use needs a recompute. False for a modified storage, whose use raises an error."""
        return self.discarded is not None and self.witness._version == self.version and not self.discarded.is_ready

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> None:
        """Recomputes the discarded bytes on the current stream. `unpack` unpacks the operands."""
        if self.discarded is None:
            raise RuntimeError(f"{self.facts.label} was not discarded, so it cannot be recomputed")
        if self.watched is not None:
            self.watched.observer.about_to_reload(self.watched)
        self.discarded.recompute(unpack, self.views)

    def forget_recomputed(self) -> None:
        """Releases the bytes that were recomputed for a trial, unless they are released already."""
        if self.discarded is None or not self.discarded.is_recomputed:
            return
        self.discarded.forget()
        if self.watched is not None:
            self.watched.observer.released_reload(self.watched)

    def _use_discarded(self, discarded: Discarded) -> torch.UntypedStorage:
        """The storage on the device. If no hook has recomputed it, this does, and nothing measures that recompute."""
        if not discarded.is_ready:
            self.recompute(unpack_without_hooks)
        was_recomputed = discarded.is_recomputed
        storage = discarded.use(is_kept=self._keeps_reloaded)
        if was_recomputed and not discarded.is_recomputed and self.watched is not None:
            self.watched.observer.released_reload(self.watched)
        return storage

    def __del__(self) -> None:
        try:
            entries, watched = (self.entry, self.reload_entry), self.watched
        except AttributeError:  # __init__ raised
            return
        for entry in entries:
            if entry is not None:
                entry.remove()
        if watched is not None:
            watched.observer.ended(watched)
