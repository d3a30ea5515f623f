"""Prefetches without a plan: the backward pass uses saves in about the reverse order of the forward pass.

Keeps the order of saves, as weak references, and which of them are on the host. Each use issues the reloads of the
storages that were saved before it, as far as the reload window allows.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# One operation may use its saves in any order, so a storage is unused by the backward pass only if it was saved after
# all of this many recent uses.
_SAVES_OF_AN_OPERATION = 8


@dataclass(slots=True)
class _Away:
    """The storages of one device that a backward pass may reload ahead of their uses, by position."""

    backward: int
    copied: list[int]  # sorted: on the host, without what this pass has reloaded
    leaving: deque[int]  # in the order of their copies, which are in flight or just over


class Lookahead:
    """The order of saves of one session, and the storages that a backward pass has still to reload ahead of their
    uses."""

    def __init__(self) -> None:
        self._next = 0  # position
        self._order: dict[int, weakref.ref[ManagedStorage]] = {}  # by position
        self._away: dict[Transport, _Away] = {}
        self._last_used = 0  # position of the last use
        self._recent: deque[int] = deque(maxlen=_SAVES_OF_AN_OPERATION)  # positions of the last uses
        self._prefetched: deque[weakref.ref[ManagedStorage]] = deque()  # reloads that were issued before their use
        self._prune_at = 64  # entries in _order; after pruning, twice the entries that remain

    def take_position(self) -> int:
        """The position of a save whose storage may be managed later."""
        self._next += 1
        return self._next - 1

    def note(self, managed: ManagedStorage, position: int | None = None) -> None:
        """Adds a storage at its first save, or at an earlier position that was taken for it."""
        if len(self._order) >= self._prune_at:
            self._prune(managed.transport)
        if position is None:
            position = self._next
            self._next += 1
        managed.position = position
        self._order[position] = managed.reference

    def _prune(self, transport: Transport) -> None:
        """Removes storages that are no longer alive."""
        self._order = {position: one for position, one in self._order.items() if one() is not None}
        transport.copied = deque(one for one in transport.copied if one() is not None)
        for away in self._away.values():
            away.copied = [position for position in away.copied if position in self._order]
            away.leaving = deque(position for position in away.leaving if position in self._order)
        self._prefetched = deque(reference for reference in self._prefetched if reference() is not None)
        self._prune_at = max(64, 2 * len(self._order))

    def living(self) -> list[ManagedStorage]:
        return [managed for reference in self._order.values() if (managed := reference()) is not None]

    def __len__(self) -> int:
        return len(self._order)

    def used(self, managed: ManagedStorage) -> None:
        """Issues the reloads of storages that were saved before `managed`, the last saved first. Each is issued once in
        a backward pass, unless it was copied to the host in that pass."""
        position, transport, backward, order = managed.position, managed.transport, _graph_task(), self._order
        if position < 0:
            return
        away = self._away.get(transport)
        if away is None or away.backward != backward:
            away = self._away[transport] = self._begin(transport, backward)
        elif transport.copied:
            copied = [one.position for reference in transport.copied if (one := reference()) is not None]
            away.leaving.extend(copied)
            transport.copied.clear()
        while away.leaving:
            left = order[away.leaving[0]]() if away.leaving[0] in order else None
            if left is not None and left.source.storage is not None:
                break  # its copy is in flight
            insort(away.copied, away.leaving.popleft())
        self._last_used = position
        self._recent.append(position)
        index = bisect_left(away.copied, position) if away.copied else 0
        while index:
            index -= 1
            saved_at = away.copied[index]
            earlier = order[saved_at]() if saved_at in order else None
            if earlier is not None and earlier.reloaded is None and not self._reload(earlier, transport):
                return
            del away.copied[index]

    def _begin(self, transport: Transport, backward: int) -> _Away:
        """The storages that were saved before this pass, as far as they were copied."""
        transport.copied.clear()
        copied = [one for one in self.living() if one.copy is not None and one.transport is transport]
        on_host = sorted([one.position for one in copied if one.source.storage is None])
        leaving = sorted([one.position for one in copied if one.source.storage is not None])
        return _Away(backward, on_host, deque(leaving))

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
