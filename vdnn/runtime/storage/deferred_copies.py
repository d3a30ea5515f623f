"""Offloads that wait until the tensor they copy is complete.

[Note: Copies wait for their operation] An operation may pack a tensor that its kernel fills only afterwards (rrelu
does so with its noise). Only a tensor with a grad_fn is certain to be complete when it is packed, so its copy is issued
at once. The copy of any other tensor is issued when its operation is over: at the first hook on the same thread that
finds a new autograd sequence number. Until then the storage stays on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _ThreadSaves:
    """The saves of one thread whose operation is not known to be over."""

    __slots__ = ("deferred", "sequence_nr")

    def __init__(self) -> None:
        self.deferred: list[weakref.ref[ManagedStorage]] = []
        self.sequence_nr = 0  # autograd's number at the latest of these saves


class DeferredCopies:
    """The deferred copies of all threads. Hooks call it while they hold the packer's lock."""

    def __init__(self) -> None:
        self._local = threading.local()

    def when_complete(self, managed: ManagedStorage, node: torch.autograd.graph.Node | None) -> None:
        """Calls `managed.complete` now or later. `node` is the grad_fn of the saved tensor.

        See [Note: Copies wait for their operation].
        """
        if node is not None:
            managed.complete()
            return
        saves = self._saves_of_this_thread()
        if managed.reference not in saves.deferred:
            saves.deferred.append(managed.reference)
        saves.sequence_nr = _sequence_nr()

    def submit_finished(self, transport: Transport) -> None:
        """Issues the copies whose operation is over, and releases the sources of completed copies."""
        saves = self._saves_of_this_thread()
        if saves.deferred and saves.sequence_nr != _sequence_nr():
            deferred, saves.deferred = saves.deferred, []
            for reference in deferred:
                managed = reference()
                if managed is not None:  # None: its graph was freed
                    managed.complete()
        transport.release_sources()

    def _saves_of_this_thread(self) -> _ThreadSaves:
        try:
            saves: _ThreadSaves = self._local.saves
        except AttributeError:
            saves = self._local.saves = _ThreadSaves()
        return saves
