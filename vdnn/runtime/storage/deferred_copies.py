"""Copies out that wait until what they copy is complete.

[Note: Copies wait for their operation] An operation may pack a tensor that its kernel fills only afterwards (rrelu
does so with its noise). Only a tensor with a history is sure to be complete when it is packed: its copy is issued at
once. That of any other is issued when the operation is over: at the first hook that finds autograd's sequence number
moved on, on the same thread. Until then the storage simply is still on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Here:
    """What waits on one thread."""

    __slots__ = ("deferred", "sequence_nr")

    def __init__(self) -> None:
        self.deferred: list[tuple[weakref.ref[ManagedStorage], bool]] = []  # and whether each is to be copied
        self.sequence_nr = 0  # autograd's, when the last of them was saved


class DeferredCopies:
    """Of all threads. Called from hooks, which hold the packer's lock."""

    def __init__(self) -> None:
        self._local = threading.local()

    def when_complete(self, managed: ManagedStorage, node: torch.autograd.graph.Node | None, *, offloads: bool) -> None:
        """See [Note: Copies wait for their operation]. `node` is the grad_fn of what was saved."""
        if node is not None:
            managed.complete(offloads=offloads)
            return
        here = self._here()
        here.deferred.append((managed.reference, offloads))
        here.sequence_nr = _sequence_nr()

    def submit_finished(self, transport: Transport) -> None:
        """Issues the copies whose operation is over."""
        here = self._here()
        if here.deferred and here.sequence_nr != _sequence_nr():
            deferred, here.deferred = here.deferred, []
            for reference, offloads in deferred:
                managed = reference()
                if managed is not None:  # else its graph is gone
                    managed.complete(offloads=offloads)
        transport.drop_released()

    def _here(self) -> _Here:
        try:
            here: _Here = self._local.here
        except AttributeError:
            here = self._local.here = _Here()
        return here
