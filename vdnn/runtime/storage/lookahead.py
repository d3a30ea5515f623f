"""Prefetches without a plan: the backward pass uses saves in about the reverse order of the forward pass.

Keeps the order of saves, as weak references. Each use issues the reloads of the storages that were saved before it, as
far as the reload window allows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# One operation may use its saves in any order, so a storage is unused by the backward pass only if it was saved after
# all of this many recent uses.
_SAVES_OF_AN_OPERATION = 8


class Lookahead:
    """The order of saves of one session, and how far ahead of the last use its reloads are issued."""

    def __init__(self) -> None:
        self._order: list[weakref.ref[ManagedStorage]] = []
        self._last_used = 0  # position of the last use
        self._ahead = 0  # reloads were issued down to this position
        self._backward, self._begin = -1, -1  # the backward pass, and the position from which they were issued in it
        # Issued from an earlier begin of the same pass: from the first of these positions down to the second.
        self._issued_before = -1, -1
        self._recent: deque[int] = deque(maxlen=_SAVES_OF_AN_OPERATION)  # positions of the last uses
        self._prefetched: deque[weakref.ref[ManagedStorage]] = deque()  # reloads that were issued before their use
        self._prune_at = 64  # entries in _order; after pruning, twice the entries that remain

    def note(self, managed: ManagedStorage) -> None:
        """Adds a storage at its first save. Called in the order of saves."""
        if len(self._order) >= self._prune_at:
            self._prune()
        managed.position = len(self._order)
        self._order.append(managed.reference)

    def _prune(self) -> None:
        """Removes storages that are no longer alive. All positions change, so the next use begins anew."""
        self._order = [reference for reference in self._order if reference() is not None]
        for position, reference in enumerate(self._order):
            known = reference()
            if known is not None:
                known.position = position
        self._prefetched = deque(reference for reference in self._prefetched if reference() is not None)
        self._prune_at = max(64, 2 * len(self._order))
        self._recent.clear()
        self._last_used = 0
        self._backward, self._begin, self._issued_before = -1, -1, (-1, -1)

    def living(self) -> list[ManagedStorage]:
        return [managed for reference in self._order if (managed := reference()) is not None]

    def __len__(self) -> int:
        return len(self._order)

    def used(self, managed: ManagedStorage) -> None:
        """Issues the reloads of storages that were saved before `managed`.

        Within one backward pass it continues where the last call stopped: to start again at each use would take
        n * n visits in a step of n saves. An operation may use its saves in ascending order, and a recompute uses what
        it reads far ahead.
        """
        position = managed.position
        if position < 0:
            return
        order, transport, backward = self._order, managed.transport, _graph_task()
        if backward != self._backward:
            self._backward, self._begin, self._ahead, self._issued_before = backward, position, position, (-1, -1)
        elif position > self._begin:
            self._issued_before = (self._begin, self._ahead) if self._issued_before[0] < 0 else (-1, -1)
            self._begin = self._ahead = position
        index, issued_from = (position if position < self._ahead else self._ahead), self._issued_before[0]
        if index > len(order):
            index = len(order)
        self._last_used = position
        self._recent.append(position)
        while index:
            if index <= issued_from:
                index, issued_from, self._issued_before = min(index, self._issued_before[1]), -1, (-1, -1)
                continue
            earlier = order[index - 1]()
            if (
                earlier is not None
                and earlier.source.storage is None
                and earlier.reloaded is None
                and earlier.copy is not None
                and earlier.transport is transport
                and not self._reload(earlier, transport)
            ):
                break
            index -= 1
        self._ahead = index

    def _reload(self, managed: ManagedStorage, transport: Transport) -> bool:
        """True if `managed` needs no further reload, False if the window or the device has no room."""
        if transport.reload_window_is_full(managed.nbytes) and not (
            self._make_room() and not transport.reload_window_is_full(managed.nbytes)
        ):
            return False
        if not managed.reload_early():
            return False
        self._prefetched.append(managed.reference)
        return True

    def _make_room(self) -> bool:
        """Releases prefetched copies that the backward pass skipped: it used a part of a graph that stays alive.

        True if any were released.
        """
        if len(self._recent) < _SAVES_OF_AN_OPERATION:
            return False
        has_released = False
        # In order of issue: storages that were saved later were prefetched earlier, and are skipped first.
        while self._prefetched:
            managed = self._prefetched[0]()
            reloaded = None if managed is None else managed.reloaded
            if managed is not None and reloaded is not None and not reloaded.is_waited_for:
                # _last_used is usually enough to decide, and cheaper than max().
                if managed.position <= self._last_used or managed.position <= max(self._recent):
                    break
                managed.release_unused_reload()
                has_released = True
            self._prefetched.popleft()
        return has_released
