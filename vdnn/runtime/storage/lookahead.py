"""Reloads ahead of use without a plan: backward goes the way of forward in reverse, so what was saved before is next.

Remembers the order of saves, weakly. A use issues the reloads of what was saved before it, as far as the window
reaches.
"""

from __future__ import annotations

import weakref
from collections import deque

from vdnn.runtime.storage.managed_storage import ManagedStorage, Residency
from vdnn.runtime.storage.transport import Transport

_HOST, _RELOADING = Residency.HOST, Residency.RELOADING

# An operation uses what it saved in any order: only what lies behind this many uses was passed by.
_SAVES_OF_AN_OPERATION = 8


class Lookahead:
    """Of one session."""

    def __init__(self) -> None:
        self._order: list[weakref.ref[ManagedStorage]] = []
        self._last_used = 0  # position of the last use, and up to where reloads were issued before it
        self._ahead = 0
        self._lately: deque[int] = deque(maxlen=_SAVES_OF_AN_OPERATION)  # positions of the last uses
        self._early: deque[weakref.ref[ManagedStorage]] = deque()  # reloaded ahead of their use, since it began anew
        self.forget_below = 64  # the order is looked through for the dead when it has doubled since

    def note(self, managed: ManagedStorage) -> None:
        """Of a save that was taken, in order."""
        if len(self._order) >= self.forget_below:
            self._forget_dead()
        managed.position = len(self._order)
        self._order.append(managed.reference)

    def _forget_dead(self) -> None:
        self._order = [reference for reference in self._order if reference() is not None]
        for position, reference in enumerate(self._order):
            known = reference()
            if known is not None:
                known.position = position
        self._early = deque(reference for reference in self._early if reference() is not None)
        self.forget_below = max(64, 2 * len(self._order))
        self._lately.clear()
        self._last_used = 0  # positions have moved: begin anew

    def living(self) -> list[ManagedStorage]:
        return [managed for reference in self._order if (managed := reference()) is not None]

    def __len__(self) -> int:
        return len(self._order)

    def used(self, managed: ManagedStorage) -> None:
        """Within one backward it goes on where it stopped: looking at everything again at each use would take a step
        of n saves n * n looks."""
        position = managed.position
        if position < 0:
            return
        order, transport = self._order, managed.transport
        index = min(self._ahead if position < self._last_used else position, position, len(order))
        self._last_used = position
        self._lately.append(position)
        while index:
            earlier = order[index - 1]()
            if (
                earlier is not None
                and earlier.residency is _HOST
                and earlier.transport is transport
                and not self._reload(earlier, transport)
            ):
                break
            index -= 1
        self._ahead = index

    def _reload(self, managed: ManagedStorage, transport: Transport) -> bool:
        """Whether there is nothing left to do for it."""
        if transport.reload_window_is_full(managed.nbytes) and not (
            self._make_room() and not transport.reload_window_is_full(managed.nbytes)
        ):
            return False
        done = managed.reload_early()
        if managed.residency is not _HOST:
            self._early.append(managed.reference)
        return done

    def _make_room(self) -> bool:
        """Gives up reloads that the backward has passed by: of a graph that is used in part and lives on."""
        if len(self._lately) < _SAVES_OF_AN_OPERATION:
            return False
        passed = False
        # In the order in which they were issued: those saved last come first, and are passed by first.
        while self._early:
            managed = self._early[0]()
            if managed is not None and managed.residency is _RELOADING:
                # The last of the lately used first: as a rule that says enough.
                if managed.position <= self._last_used or managed.position <= max(self._lately):
                    break
                managed.forget_unused_reload()
                passed = True
            self._early.popleft()
        return passed
