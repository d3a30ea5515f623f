"""Keeps a step within its budget that has no plan, or is larger than planned, and moves no more than that takes.

Every save stays on the device at first. Once the bytes on the device come too near to the budget, the guard evicts the
storages that the backward pass uses last: those that were saved first. It counts by itself and asks no allocator.

[Note: The margin] A step that was never seen allocates what no hook sees: results that are not saved, gradients, the
workspace of an operation. The guard leaves room for the gradients of all parameters, for `_TRANSIENTS` times the
largest storage that was saved so far, and for both windows of copies in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.plan import Action

# A backward operation may hold several tensors of the size of the largest: that of a power has three, and the gradient
# that it reads comes on top.
_TRANSIENTS = 4


class Guard:
    """The guard of one step. `room_bytes` is the budget less what was allocated when the step began, the gradients that
    it will allocate, and the windows. `offload` issues a copy as soon as the running operation is over."""

    def __init__(self, room_bytes: int, offload: Callable[[ManagedStorage], None]) -> None:
        self._room_bytes = room_bytes
        self._offload = offload
        self._held: dict[int, int] = {}  # lifetime -> the bytes that it holds on the device, until it is evicted
        self._held_bytes = 0
        self._largest_bytes = 0
        self._small_bytes_before: int | None = None
        self._candidates: dict[int, weakref.ref[ManagedStorage]] = {}  # by lifetime, the first saved comes first

    def began(self, lifetime: int, nbytes: int) -> None:
        """A storage was saved for the first time, and is on the device."""
        self._held[lifetime] = nbytes
        self._held_bytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def take_over(self, kept: dict[int, ManagedStorage]) -> None:
        """Takes over a step that outgrew its plan, which kept these lifetimes. What was planned may be evicted."""
        for lifetime, managed in kept.items():
            self.began(lifetime, managed.nbytes)
        for lifetime, managed in kept.items():
            if managed.watched is not None and managed.watched.planned is not None:
                self.hold(lifetime, managed)

    def ended(self, lifetime: int) -> None:
        """Called on any thread."""
        self._held_bytes -= self._held.pop(lifetime, 0)

    def hold(self, lifetime: int, managed: ManagedStorage) -> None:
        """Keeps a storage that may be moved, until it has to be evicted. It may be held already."""
        counters = managed.facts.counters
        if lifetime not in self._candidates:
            counters.keep(Kept.FITS, managed.nbytes)
            self._candidates[lifetime] = managed.reference
        small_bytes = counters.kept_bytes[Kept.SMALL]  # of the session so far
        if self._small_bytes_before is None:
            self._small_bytes_before = small_bytes
        unseen_bytes = small_bytes - self._small_bytes_before + _TRANSIENTS * self._largest_bytes
        while self._candidates and self._held_bytes + unseen_bytes > self._room_bytes:
            first = next(iter(self._candidates))
            self._evict(first, self._candidates.pop(first))

    def step_ended(self) -> None:
        """Evicts what outlives the step, as a plan would: the memory of the next step must not depend on whether this
        one had a plan."""
        for lifetime, reference in self._candidates.items():
            self._evict(lifetime, reference)
            managed = reference()
            if managed is not None:
                managed.complete()  # no operation is running
        self._candidates.clear()

    def _evict(self, lifetime: int, reference: weakref.ref[ManagedStorage]) -> None:
        managed = reference()
        if managed is None or managed.action is Action.OFFLOAD:
            return
        self._held_bytes -= self._held.pop(lifetime, 0)
        managed.facts.counters.keep(Kept.FITS, -managed.nbytes, saves=-1)
        self._offload(managed)
