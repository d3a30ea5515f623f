"""Keeps a step that follows a plan within its budget, where it takes more than the plan has room for.

It compares the storages on the device with those that the plan has there. Storages that are smaller than planned, or
missing, make room for storages that are larger, or not in the plan: some experts get more tokens than when the step was
recorded, and others fewer. If that is not enough, it evicts storages that the plan keeps, first saved first, and
reloads them before their use.

[Note: What grew] Transient bytes and gradients are planned, so the margin is for what grew. It is the largest growth of
storages that are saved near each other, because recomputed storages do not count otherwise. If a storage is larger than
all that the plan saves nearby, its operations may take more than the plan has for any of them: as many times that as a
step without a plan leaves for its largest storage (see [Note: The margin] in guard.py). And what operations of the plan
take soon is expected to have grown as much as the last saves. If the step continues after the last save of the plan
(another forward pass), any operation of the plan may come again, as large as what it has repeated so far. Nothing
predicts operations that come between those of the plan. If earlier steps of the session differed and therefore exceeded
their budgets, the excess stays free in addition once a step differs.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable

from vdnn.runtime.steps.executor import NEARBY, Executor
from vdnn.runtime.steps.guard import TRANSIENTS, Guard
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.forms import Form

# An evicted storage is reloaded when the backward pass is this many lifetimes away from it, or only `_NEXT` if there is
# no room before.
_SOON = 8
_NEXT = 2
# Storages that were saved in this first part of the step so far are unused for long enough to be evicted.
_EARLY = 0.75


def _nbytes(reference: weakref.ref[ManagedStorage]) -> int:
    managed = reference()
    return 0 if managed is None else managed.nbytes


class PlanGuard(Guard):
    """The guard of a step that follows a plan. `room_bytes` is the budget less the peak of the plan; `unforeseen_bytes`
    are what earlier steps that differed took above the budget."""

    def __init__(
        self, room_bytes: int, offload: Callable[[ManagedStorage], None], followed: Executor, unforeseen_bytes: int = 0
    ) -> None:
        super().__init__(room_bytes, offload)
        self._followed = followed
        self._unforeseen_bytes = unforeseen_bytes
        self._evicted: list[tuple[int, weakref.ref[ManagedStorage]]] = []  # the last saved comes last
        self._leaving: dict[int, weakref.ref[ManagedStorage]] = {}  # evicted, and still on the device
        self._leaving_bytes = 0
        self._offloads: dict[int, weakref.ref[ManagedStorage]] = {}  # that the plan has not released yet
        self._passing: dict[int, int] = {}  # lifetimes that the plan offloads -> the bytes that they hold on the device
        self._recent: deque[tuple[int, int]] = deque(maxlen=NEARBY)  # bytes of the last storages, and as planned
        self._grows = 0.0  # how much larger they are, as a share of what was planned
        self._repeated_bytes = 0  # saved again after all that the plan knows, and as planned the first time
        self._planned_bytes = 0
        self._is_saving = True  # the last hook was that of a save

    # The storages on the device.

    def saved(self, nbytes: int) -> None:
        followed = self._followed
        self._is_saving = True
        self._recent.append((nbytes, followed.last_bytes))
        recent_bytes, planned_bytes = map(sum, zip(*self._recent, strict=True))
        self._grows = max(0, recent_bytes / planned_bytes - 1)
        self.leaves_room(recent_bytes - planned_bytes)
        self.leaves_room(TRANSIENTS * (nbytes - followed.bytes_nearby))

    def saved_unknown(self, nbytes: int, form: Form) -> None:
        like_bytes = self._followed.bytes_like(form)
        if self._followed.is_past_saves and like_bytes:
            self._repeated_bytes += nbytes
            self._planned_bytes += like_bytes

    def came_back(self, lifetime: int, nbytes: int) -> None:
        self.is_here(lifetime, nbytes)

    def is_here(self, lifetime: int, nbytes: int) -> None:
        super().is_here(lifetime, nbytes)
        if lifetime in self._passing:
            self._passing[lifetime] = nbytes

    def is_gone(self, lifetime: int) -> None:
        super().is_gone(lifetime)
        if lifetime in self._passing:
            self._passing[lifetime] = 0

    def stays(self, lifetime: int, nbytes: int) -> None:
        self._offloads.pop(lifetime, None)
        if lifetime in self._leaving:
            self._has_left(lifetime)
        super().stays(lifetime, nbytes)

    @property
    def _margin_bytes(self) -> int:
        """See [Note: What grew]."""
        followed = self._followed
        grown_bytes = max(self._unseen_bytes, int(self._grows * followed.transient_bytes))
        share = min(1.0, self._repeated_bytes / max(1, self._planned_bytes))
        unforeseen_bytes = self._unforeseen_bytes if followed.differences else 0
        return unforeseen_bytes + max(grown_bytes, int(share * followed.more_transient_bytes))

    def _over_bytes(self) -> int:
        """The bytes that have no room, of the storages that stay until their use. Those that the plan offloads only
        pass through the device."""
        followed = self._followed
        staying_bytes = self._held_bytes + self.gated_bytes() - sum(self._passing.values())
        over_bytes = staying_bytes - followed.kept_bytes + self._margin_bytes
        return over_bytes - self._room_bytes - followed.spare_bytes_nearby

    def _over_bytes_now(self) -> int:
        """The bytes on the device that have no room now."""
        followed = self._followed
        here_bytes = self._held_bytes + self.gated_bytes() + self._leaving_bytes
        over_bytes = here_bytes - followed.stored_bytes + self._margin_bytes
        return over_bytes - self._room_bytes - followed.spare_bytes

    # The storages that leave it.

    def make_room(self) -> None:
        if self.earlier:
            self._evict_earlier(max(self._over_bytes(), self._over_bytes_now()))
        self._release_what_leaves()
        if self._is_saving:
            super().make_room()

    def _release_what_leaves(self) -> None:
        """Releases storages that were evicted or that the plan offloads, until the rest has room."""
        while (self._leaving or self._offloads) and self._over_bytes_now() > 0:
            lifetime, reference = next(iter((self._leaving or self._offloads).items()))
            managed = reference()
            if managed is not None and managed.copy is None and managed.source.storage is not None:
                return  # its operation is still running
            self._leaves(lifetime, managed)

    def _leaves(self, lifetime: int, managed: ManagedStorage | None) -> None:
        """Releases a storage that was evicted, or that the plan offloads."""
        self.has_acted = True
        if lifetime in self._leaving:
            self._has_left(lifetime)
        else:
            del self._offloads[lifetime]
            self.is_gone(lifetime)
        if managed is not None:
            managed.release()

    def free_now(self, nbytes: int) -> None:
        for lifetime, reference in [*self._leaving.items(), *self._offloads.items()]:
            managed = reference()
            if nbytes <= 0:
                return
            if managed is None or managed.copy is None or not managed.can_be_evicted:
                continue
            self._leaves(lifetime, managed)
            nbytes -= managed.nbytes
        super().free_now(nbytes)

    def _choose(self) -> int:
        """Chooses among the candidates that were saved first, since these would be away for the longest time: the
        smallest storage that is large enough. Takes the largest of the smaller ones instead if the first would be more
        than twice as large as needed and the smaller ones together are enough."""
        over_bytes = self._over_bytes()
        early = itertools.islice(self._candidates.items(), math.ceil(_EARLY * len(self._candidates)))
        sizes = [(_nbytes(reference), lifetime) for lifetime, (reference, _) in early]
        larger = [one for one in sizes if one[0] >= over_bytes]
        smaller = [one for one in sizes if one[0] < over_bytes]
        if larger and (min(larger)[0] <= 2 * over_bytes or sum(nbytes for nbytes, _ in smaller) < over_bytes):
            return min(larger)[1]
        return max(smaller)[1]

    def _evict(self, lifetime: int, reference: weakref.ref[ManagedStorage], why: Kept) -> bool:
        if not super()._evict(lifetime, reference, why):
            return False
        self._evicted.append((lifetime, reference))
        self._leaving[lifetime] = reference
        self._leaving_bytes += _nbytes(reference)
        return True

    def _has_left(self, lifetime: int) -> None:
        self._leaving_bytes -= _nbytes(self._leaving.pop(lifetime))

    def step_ended(self) -> None:
        """Evicts nothing: a plan decides on storages that outlive the step, too."""

    # What comes back.

    def will_leave(self, lifetime: int, managed: ManagedStorage) -> None:
        """Notes a storage that the plan offloads, since the guard may have to release it earlier than planned."""
        self._offloads[lifetime] = managed.reference
        self._passing[lifetime] = managed.nbytes

    def has_room(self, nbytes: int) -> bool:
        """True if the plan may reload a storage of this many bytes now. Otherwise it is reloaded a little later."""
        return self._over_bytes_now() + nbytes <= 0

    def used(self, lifetime: int) -> bool:
        """Reloads evicted storages that will be used soon."""
        self._is_saving = False
        self._offloads.clear()
        while self._evicted and self._evicted[-1][0] >= lifetime - _SOON:
            evicted, reference = self._evicted[-1]
            managed = reference()
            if evicted in self._leaving:
                self._has_left(evicted)
                self.is_here(evicted, _nbytes(reference))
            elif managed is not None:
                if evicted < lifetime - _NEXT and not self.has_room(managed.nbytes):
                    break
                managed.reload_early()
            self._evicted.pop()
        return True
