"""Keeps the source of an offload alive while the copy reads it, and counts at the release if its memory was freed.

The release frees the memory only if no holder outside the runtime keeps the storage alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vdnn import _C
from vdnn.runtime.storage.geometry import label_text
from vdnn.runtime.storage.holders import HeldStorage

if TYPE_CHECKING:
    from vdnn.runtime.storage.managed_storage import ManagedStorage
    from vdnn.runtime.storage.transport import ReleaseContext


def _references_of_one_variable() -> int:
    """The sys.getrefcount of an object that one local variable holds: 2, or 1 from Python 3.14 on."""
    alone = object()
    return sys.getrefcount(alone)


HELD_ONCE = _references_of_one_variable()
_references_to = sys.getrefcount
_natively_held: Callable[[int], int] = torch._C._storage_Use_Count


class SourceHold:
    """Keeps a source storage alive while a copy reads it, and informs the managed storage of the release."""

    __slots__ = (
        "_address",
        "_context",
        "_counters",
        "_geometry",
        "_managed",
        "_nbytes",
        "_saved_in",
        "_storage",
        "_stream",
        "copied",
    )

    def __init__(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        self._managed = managed.reference
        self._storage: torch.UntypedStorage | None = storage
        self._stream = managed.stream
        self._context = managed.transport.release_context
        self._geometry = managed.geometry
        self._saved_in = managed.saved_in
        self._counters = managed.counters
        self._address = managed.address
        self._nbytes = managed.nbytes
        self.copied: _C.Event | None = None  # the end of the copy; set only if hooks have run on several streams

    def release(self) -> None:
        """Releases the source. Called once its owner stream waits for the copy. Does not block."""
        managed = self._managed()
        if managed is not None:
            managed.source_released()
        storage, self._storage = self._storage, None
        if storage is None:
            return
        context = self._context
        if context.streams:
            self._make_other_streams_wait(context)
        if _natively_held(storage._cdata) > 1 or _references_to(storage) > HELD_ONCE:
            # Another holder (the model, an optimizer, a cache, or a second save at another version, which shares the
            # Python object): the storage was copied and is not freed.
            self._counters.copied_not_freed_bytes += self._nbytes
            label = label_text(self._geometry, self._saved_in)
            context.held.append(HeldStorage(weakref.ref(storage), self._nbytes, label))
            if managed is not None:
                managed.source_held_by_others(storage)
            return
        self._counters.freed_bytes += self._nbytes
        if context.notes_releases:
            context.device.note_access(self._address, self._nbytes, _C.Access.RELEASE, self._stream, "storage released")

    def _make_other_streams_wait(self, context: ReleaseContext) -> None:
        """[Note: Who allocated it] A storage returns to the stream that allocated it, and torch does not say which
        stream that was. The stream of the save already waits for the copy. This makes every other stream wait that
        hooks have run on."""
        device = context.device
        for stream in context.streams:
            if stream != self._stream:
                device.wait(stream, self.copied or device.record(self._stream))
