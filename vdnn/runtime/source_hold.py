"""What keeps the source of a copy alive while the copy reads it, and says what became of it.

Giving it up frees its memory only if nobody else holds it; that is found out when it goes, and counted.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

import torch

from vdnn import _C
from vdnn.runtime.holders import HeldStorage, label_text

if TYPE_CHECKING:
    from vdnn.runtime.residency import ManagedStorage


def _count_of_one() -> int:
    """What sys.getrefcount says of an object that one local variable holds: 2, or 1 from Python 3.14 on."""
    alone = object()
    return sys.getrefcount(alone)


HELD_ONCE = _count_of_one()


class SourceHold:
    """Keeps a source storage alive while a copy reads it; says so when it goes."""

    __slots__ = (
        "_counters",
        "_device",
        "_held",
        "_label",
        "_managed",
        "_range",
        "_storage",
        "_stream",
        "_streams",
        "_takes_releases",
        "copied",
    )

    def __init__(self, managed: ManagedStorage, storage: torch.UntypedStorage, stream: _C.Stream) -> None:
        self._managed = weakref.ref(managed)
        self._storage: torch.UntypedStorage | None = storage
        self._stream = stream
        # Not the transport: its queue holds us, and no collector sees that cycle.
        self._device = managed.transport.device
        self._takes_releases = managed.transport.takes_releases
        self._streams = managed.transport.streams
        self.copied: _C.Event | None = None  # set where there are several streams
        self._held = managed.transport.held
        self._label = managed.label
        self._counters = managed.counters
        self._range = (managed.address, managed.nbytes)

    def dropped(self) -> None:
        managed = self._managed()
        if managed is not None:
            managed.source_is_gone()
        storage, self._storage = self._storage, None
        if storage is None:
            return
        address, nbytes = self._range
        self._hold_others_back()
        if torch._C._storage_Use_Count(storage._cdata) > 1 or sys.getrefcount(storage) > HELD_ONCE:
            # Somebody else holds it (the model, an optimizer, a cache, a second save of it at another version, which
            # shares the Python object): it was copied and will not be freed.
            self._counters.copied_not_freed_bytes += nbytes
            self._held.append(HeldStorage(weakref.ref(storage), nbytes, label_text(self._label)))
            if managed is not None:
                managed.source_stays(storage)
            return
        self._counters.freed_bytes += nbytes
        if self._takes_releases:
            self._device.note_access(address, nbytes, _C.Access.RELEASE, self._stream, "storage dropped")

    def _hold_others_back(self) -> None:
        """[Note: Who allocated it] A storage goes back to the stream that allocated it, and torch does not say which
        that was: the stream of its save waits for the copy already, and here all others wait that hooks have run
        on."""
        for stream in self._streams:
            if stream != self._stream:
                self._device.wait(stream, self.copied or self._device.record(self._stream))
