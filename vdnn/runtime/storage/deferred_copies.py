"""Defers saves until their operation is over, above all saves whose storage is to be copied to the host.

[Note: Copies wait for their operation] An operation may pack a tensor that its kernel fills only afterwards (rrelu
does so with its noise). Only a tensor with a grad_fn is certain to be complete when it is packed, so its copy is issued
at once. The copy of any other tensor is issued when its operation is over: at the first hook on the same thread that
finds a new autograd sequence number. Until then the storage stays on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr

Item = TypeVar("Item")


class _OfThread(threading.local):
    """Made anew in each thread that looks at it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Any]] = []


class AfterOperation(Generic[Item]):
    """The items of each thread that wait until the operation that is running now is over. Callers hold the packer's
    lock."""

    def __init__(self) -> None:
        self._here = _OfThread()
        self.number = 0  # on all threads: usually 0, and then there is nothing to look up

    def waiting(self) -> list[tuple[int, Item]]:
        """The items of this thread, the oldest first, each with autograd's sequence number when it was added."""
        return self._here.waiting

    def add(self, item: Item) -> None:
        self.number += 1
        self.waiting().append((_sequence_nr(), item))

    def take(self) -> Iterable[Item]:
        """Takes the items of this thread whose operation is over."""
        waiting = self._here.waiting if self.number else ()
        if not waiting:
            return ()
        now, over = _sequence_nr(), []
        while waiting and waiting[0][0] != now:  # those of the operation that runs now were added last
            over.append(waiting.pop(0)[1])
        self.number -= len(over)
        return over


class DeferredCopies(AfterOperation[weakref.ref[ManagedStorage]]):
    """The deferred copies of all threads. Hooks call it while they hold the lock of the saves."""

    def when_complete(self, managed: ManagedStorage, node: torch.autograd.graph.Node | None) -> None:
        """Calls `managed.complete` now or later. `node` is the grad_fn of the saved tensor.

        See [Note: Copies wait for their operation].
        """
        if node is not None:
            managed.complete()
        elif not self.number or all(reference is not managed.reference for _, reference in self.waiting()):
            self.add(managed.reference)

    def submit_finished(self, transport: Transport) -> None:
        """Issues the copies whose operation is over, and releases the sources of completed copies."""
        if self.number:
            for reference in self.take():
                managed = reference()
                if managed is not None:  # None: its graph was freed
                    managed.complete()
        transport.release_sources()
