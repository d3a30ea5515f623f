"""What keeps the source of a copy alive while the copy reads it, and says what became of it.

Giving it up frees its memory only if nobody else holds it; that is found out when it goes, and counted.
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
    from vdnn.runtime.storage.transport import Departures


def _count_of_one() -> int:
    """What sys.getrefcount says of an object that one local variable holds: 2, or 1 from Python 3.14 on."""
    alone = object()
    return sys.getrefcount(alone)


HELD_ONCE = _count_of_one()
_references_to = sys.getrefcount
_natively_held: Callable[[int], int] = torch._C._storage_Use_Count


class SourceHold:
    """Keeps a source storage alive while a copy reads it; says so when it goes."""

    __slots__ = (
        "_address",
        "_counters",
        "_departures",
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
        self._departures = managed.transport.departures
        self._geometry = managed.geometry
        self._saved_in = managed.saved_in
        self._counters = managed.counters
        self._address = managed.address
        self._nbytes = managed.nbytes
        self.copied: _C.Event | None = None  # set where there are several streams

    def dropped(self) -> None:
        managed = self._managed()
        if managed is not None:
            managed.source_is_gone()
        storage, self._storage = self._storage, None
        if storage is None:
            return
        departures = self._departures
        if departures.streams:
            self._hold_others_back(departures)
        if _natively_held(storage._cdata) > 1 or _references_to(storage) > HELD_ONCE:
            # Somebody else holds it (the model, an optimizer, a cache, a second save of it at another version, which
            # shares the Python object): it was copied and will not be freed.
            self._counters.copied_not_freed_bytes += self._nbytes
            label = label_text(self._geometry, self._saved_in)
            departures.held.append(HeldStorage(weakref.ref(storage), self._nbytes, label))
            if managed is not None:
                managed.source_stays(storage)
            return
        self._counters.freed_bytes += self._nbytes
        if departures.takes_releases:
            departures.device.note_access(
                self._address, self._nbytes, _C.Access.RELEASE, self._stream, "storage dropped"
            )

    def _hold_others_back(self, departures: Departures) -> None:
        """[Note: Who allocated it] A storage goes back to the stream that allocated it, and torch does not say which
        that was: the stream of its save waits for the copy already, and here all others wait that hooks have run
        on."""
        device = departures.device
        for stream in departures.streams:
            if stream != self._stream:
                device.wait(stream, self.copied or device.record(self._stream))
