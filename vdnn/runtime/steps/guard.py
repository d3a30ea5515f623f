"""Keeps a step without a plan within its budget, and moves no more than that takes.

Every save stays on the device at first. Once the bytes on the device come too near to the budget, the guard evicts what
graphs of earlier steps still hold, and then the storages that the backward pass uses last: those that were saved first.
It counts by itself and asks no allocator.

[Note: The margin] A step that was never seen allocates what no hook sees: results that are not saved, gradients, the
workspace of an operation. The guard leaves room for the gradients of all parameters, for `TRANSIENTS` times the
largest storage that was saved so far, and for one window of copies in flight. Before a matrix product,
whose result may be far larger (logits), it also leaves room for that result and for the next one that is made from it.
Reloads ahead of their use share the window with the offloads that are still in flight, and have what the backward pass
has freed.

[Note: The device has no room] The margin may be more than the budget has: weights and gradients alone may take nearly
all of it, and a copy may be larger than its window. So the guard also looks at the bytes that are allocated, while
copies are in flight. If the next operation may have no room, the guard waits for copies to the host, the oldest first,
and reloads nothing ahead. No hook sees operations between two hooks, such as those of a loss that torch checkpoints.
The bytes that they took are known only behind them: later steps without a plan keep this many bytes free. A recorded
step keeps what came back for the case that a second backward uses it again. If there is no room for that, the guard
releases it once it was used, the oldest first.

[Note: The host runs short] A storage whose copy the host refuses stays on the device, and nothing else makes room then.
So once the copies of a step have taken a part of the memory that the host had for them, the guard discards storages
that can be recomputed in place of offloading others: first those that are cheap to recompute. A recompute makes all
that was discarded among what it reads, and among what that reads. The guard bounds the bytes of such a chain, and
leaves room for the longest one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vdnn.runtime.steps.earlier_graphs import EarlierGraphs
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.forms import Form
from vdnn.step.plan import Action

# A backward operation may hold several tensors of the size of the largest: that of a power has three, and the gradient
# that it reads comes on top.
TRANSIENTS = 4
_RESULTS = TRANSIENTS - 1  # without the gradient that it reads
# The shares of the host's free memory behind which storages are discarded, see [Note: The host runs short].
_SHARE_OF_CHEAP, _SHARE_OF_ALL = 1 / 8, 1 / 4
# This many of the last uses are not released: they may be those of the running operation, which holds what it reads.
_NEWEST_USES = 8
_MOST_CHAIN = 8  # one part in this many of the room is left for a chain of recomputes


class _Recomputable(NamedTuple):
    """A storage that can be recomputed from the lifetimes `reads`."""

    reads: Sequence[int]
    discard: Callable[[], bool]
    is_cheap: bool


def _nothing() -> None:
    """Does nothing: no gate keeps anything."""


def _none(_: int) -> int:
    """Returns 0: nobody counts the bytes that are allocated, so none are lacking."""
    return 0


class Guard:
    """The guard of one step. `room_bytes` is the budget less what was allocated when the step began, the gradients that
    it will allocate, and a window of copies. `offload` issues a copy as soon as the running operation is over."""

    def __init__(self, room_bytes: int, offload: Callable[[ManagedStorage], None]) -> None:
        self._room_bytes = room_bytes
        self._offload = offload
        self._held: dict[int, int] = {}  # lifetime -> the bytes that it holds on the device
        self._held_bytes = 0
        self._unseen_bytes = 0  # that operations may take beyond their saves
        self._next_bytes = 0  # that the next operation may take beyond all that is allocated before it
        self._small_bytes = 0  # of this step, in tensors that are too small to be moved
        self._small_bytes_before: int | None = None
        self.has_acted = False  # it moved something
        self.gated_bytes: Callable[[], int] = int  # held by saves that the native gate keeps
        self.manage_gated: Callable[[], None] = _nothing  # lets this guard evict what the gate keeps
        self.in_flight_bytes: Callable[[], int] = int  # held by copies in flight
        self.lacking_bytes: Callable[[int], int] = _none  # of a number of bytes, beyond all that is allocated now
        self._in_flight: deque[weakref.ref[ManagedStorage]] = deque()  # evicted, the oldest first
        self._used_evicted: deque[weakref.ref[ManagedStorage]] = deque()  # the oldest use first
        self.window_bytes = 0  # room for them, besides `room_bytes`
        self.host_share: Callable[[], float] = float  # of the host's memory that was free as the step began
        self._recomputable: dict[int, _Recomputable] = {}  # by lifetime: the first saved comes first
        self._discarded: dict[int, tuple[int, Sequence[int]]] = {}  # lifetime -> its bytes, and what it is made from
        self._read_bytes: dict[int, int] = {}  # discarded lifetime -> the bytes that its recompute makes
        self._reader_bytes: dict[int, int] = {}  # lifetime -> those of the recomputes that read it
        self._chain_bytes = 0  # of the longest chain
        self.earlier = EarlierGraphs()
        self.freed_bytes = 0  # of earlier graphs, since the last call of take_freed_bytes()
        self._candidates: dict[int, tuple[weakref.ref[ManagedStorage], Kept]] = {}  # the first saved comes first

    # The storages on the device.

    def saved(self, nbytes: int) -> None:
        """A storage was saved for the first time."""
        self._unseen_bytes = max(self._unseen_bytes, TRANSIENTS * nbytes)
        self._next_bytes = max(self._next_bytes, _RESULTS * nbytes)

    def saved_unknown(self, nbytes: int, form: Form) -> None:
        """The plan does not know a storage that was saved."""

    def leaves_room(self, nbytes: int) -> None:
        """Keeps this many bytes free from now on."""
        self._unseen_bytes, self._next_bytes = max(self._unseen_bytes, nbytes), max(self._next_bytes, nbytes)

    def leaves_less(self, nbytes: int) -> bool:
        """True if an operation that takes this many bytes takes more than was predicted."""
        return nbytes > self._unseen_bytes

    def is_here(self, lifetime: int, nbytes: int) -> None:
        self._held_bytes += nbytes - self._held.get(lifetime, 0)
        self._held[lifetime] = nbytes

    def came_back(self, lifetime: int, nbytes: int) -> None:
        """A reload was issued. The window has room for it."""

    def used(self, lifetime: int) -> bool:
        """The backward pass used this lifetime. True if this decides what is reloaded."""
        return False

    def used_evicted(self, managed: ManagedStorage) -> None:
        """A recorded step uses a storage that was evicted, and keeps it until its graph is freed."""
        self._used_evicted.append(managed.reference)

    def is_gone(self, lifetime: int) -> None:
        """Called on any thread."""
        self._held_bytes -= self._held.pop(lifetime, 0)

    def stays(self, lifetime: int, nbytes: int) -> None:
        """Its copy was refused."""
        self.is_here(lifetime, nbytes)

    def take_over(self, kept: dict[int, ManagedStorage]) -> None:
        """Takes over a step that has outgrown its plan, which kept these lifetimes. Planned storages may be evicted."""
        for lifetime, managed in kept.items():
            self.saved(managed.nbytes)
            self.is_here(lifetime, managed.nbytes)
            if managed.watched is not None and managed.watched.planned is not None:
                self.hold(lifetime, managed, Kept.PLAN)

    def will_leave(self, lifetime: int, managed: ManagedStorage) -> None:
        """A plan offloads it."""

    def has_room(self, nbytes: int) -> bool:
        """True if a storage of this many bytes may be reloaded ahead of its use."""
        fits_window = self._over_bytes() + self.in_flight_bytes() + nbytes <= self.window_bytes
        return fits_window and not self.lacking_bytes(nbytes + self._next_bytes)

    # The storages that leave it.

    def hold(self, lifetime: int, managed: ManagedStorage, why: Kept = Kept.FITS) -> None:
        """Keeps a storage that may be moved, until it has to be evicted. It may be held already."""
        counters = managed.facts.counters
        if lifetime not in self._candidates:
            if why is Kept.FITS:
                counters.keep(why, managed.nbytes)
            self._candidates[lifetime] = managed.reference, why
        self.count_small(counters)

    def hold_again(self, lifetime: int, managed: ManagedStorage) -> None:
        """The same for a storage that the gate has kept, and that was counted then."""
        is_later = not self._candidates or next(reversed(self._candidates)) < lifetime
        self._candidates[lifetime] = managed.reference, Kept.FITS
        if not is_later:
            self._candidates = dict(sorted(self._candidates.items()))

    def count_small(self, counters: Counters) -> None:
        """Reads what the step has kept in small tensors so far."""
        small_bytes = counters.kept_bytes[Kept.SMALL]  # of the session so far
        if self._small_bytes_before is None:
            self._small_bytes_before = small_bytes
        self._small_bytes = small_bytes - self._small_bytes_before

    def can_discard(self, lifetime: int, reads: Sequence[int], discard: Callable[[], bool], *, is_cheap: bool) -> None:
        """A storage that is held can be recomputed from these lifetimes. `discard` does not succeed always."""
        self._recomputable[lifetime] = _Recomputable(reads, discard, is_cheap)

    def _discard_one(self) -> bool:
        """See [Note: The host runs short]. True if a storage was discarded."""
        share = self.host_share() if self._recomputable else 0
        if share <= _SHARE_OF_CHEAP:
            return False
        most_bytes = max(self._unseen_bytes, self._room_bytes // _MOST_CHAIN)
        for lifetime, one in list(self._recomputable.items()):
            if lifetime not in self._candidates:
                del self._recomputable[lifetime]
                continue
            chain_bytes = self._chain_with(lifetime, one.reads)
            if chain_bytes > most_bytes or not (one.is_cheap or share > _SHARE_OF_ALL):
                continue
            del self._recomputable[lifetime]
            if one.discard():
                self._was_discarded(lifetime, one.reads)
                self._chain_bytes = max(self._chain_bytes, chain_bytes)
                return True
        return False

    def _chain_with(self, lifetime: int, reads: Sequence[int]) -> int:
        """The bytes of the longest chain of recomputes that this lifetime is in, if it is discarded."""
        own_bytes = self._held.get(lifetime, 0)  # none if its graph has been freed
        read_bytes = sum(self._read_bytes.get(one, 0) for one in reads)
        return own_bytes + read_bytes + self._reader_bytes.get(lifetime, 0)

    def _was_discarded(self, lifetime: int, reads: Sequence[int]) -> None:
        reference, why = self._candidates.pop(lifetime)
        managed, nbytes = reference(), self._held.get(lifetime, 0)
        self._read_bytes[lifetime] = nbytes + sum(self._read_bytes.get(one, 0) for one in reads)
        self._discarded[lifetime] = nbytes, reads
        waiting = [lifetime]
        while waiting:
            reader = waiting.pop()
            own_bytes, reads = self._discarded.get(reader, (0, ()))
            readers_bytes = own_bytes + self._reader_bytes.get(reader, 0)
            longer = [one for one in reads if readers_bytes > self._reader_bytes.get(one, 0)]
            self._reader_bytes.update(dict.fromkeys(longer, readers_bytes))
            waiting += longer
        if managed is not None:
            managed.facts.counters.keep(why, -nbytes, saves=-1)
        self.is_gone(lifetime)

    def make_room(self) -> None:
        """Evicts until the step fits its budget again. Called at the end of each hook."""
        if self.earlier:
            self._evict_earlier(self._over_bytes())
        if self._over_bytes() > 0:
            self.manage_gated()
        while self._candidates and self._over_bytes() > 0:
            if not self._discard_one():
                chosen = self._choose()
                self._evict(chosen, *self._candidates.pop(chosen))
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """See [Note: The device has no room]. Does not block the host."""
        while self._in_flight and self.lacking_bytes(self._next_bytes):
            managed = self._in_flight[0]()
            if managed is not None and managed.source.storage is not None:
                if managed.copy is None and not managed.is_complete:
                    return  # its operation is still running
                managed.release()
            self._in_flight.popleft()
        while len(self._used_evicted) > _NEWEST_USES and self.lacking_bytes(self._next_bytes):
            managed = self._used_evicted.popleft()()
            if managed is not None:
                managed.release()

    def _evict_earlier(self, over_bytes: int) -> None:
        if over_bytes > 0:
            freed_bytes = self.earlier.evict(over_bytes)
            self.has_acted |= freed_bytes > 0
            self.freed_bytes += freed_bytes
            self._room_bytes += freed_bytes

    def take_freed_bytes(self) -> int:
        """The bytes that graphs of earlier steps held when this was called last, and that were freed since."""
        freed_bytes, self.freed_bytes = self.freed_bytes, 0
        return freed_bytes

    def free_now(self, nbytes: int) -> None:
        """Evicts this many bytes and waits for their copies, because the running hook needs the memory at once. As far
        as operations are over, and nobody else holds the bytes."""
        if nbytes > 0:
            self.manage_gated()
        for lifetime, (reference, why) in list(self._candidates.items()):
            if nbytes <= 0:
                return
            managed = reference()
            if managed is None or not managed.is_complete or not managed.can_be_evicted:
                continue
            del self._candidates[lifetime]
            if self._evict(lifetime, reference, why):
                managed.complete()
                managed.release()
                nbytes -= managed.nbytes

    @property
    def kept(self) -> dict[int, Kept]:
        """The lifetimes that could still be evicted, and why they were kept."""
        return {lifetime: why for lifetime, (_, why) in self._candidates.items()}

    def _choose(self) -> int:
        """The lifetime to evict next."""
        return next(iter(self._candidates))

    def _over_bytes(self) -> int:
        """How much more the step takes than there is room for, with the margin."""
        taken_bytes = self._held_bytes + self.gated_bytes() + self._small_bytes
        return taken_bytes + self._unseen_bytes + self._chain_bytes - self._room_bytes

    def step_ended(self) -> None:
        """Evicts what outlives the step, as a plan would: the memory of the next step must not depend on whether this
        one had a plan."""
        for lifetime, (reference, why) in self._candidates.items():
            self._evict(lifetime, reference, why)
            managed = reference()
            if managed is not None:
                managed.complete()  # no operation is running
        self._candidates.clear()

    def _evict(self, lifetime: int, reference: weakref.ref[ManagedStorage], why: Kept) -> bool:
        managed = reference()
        if managed is None or managed.action is Action.OFFLOAD:
            return False
        self.has_acted = True
        self.is_gone(lifetime)
        managed.facts.counters.keep(why, -managed.nbytes, saves=-1)
        self._offload(managed)
        self._in_flight.append(reference)
        return True
