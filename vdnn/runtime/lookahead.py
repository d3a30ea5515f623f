"""Reloads ahead of use without a plan: backward goes the way of forward in reverse, so what was saved before is next.

Remembers the order of saves, weakly. A use issues the reloads of what was saved before it, as far as the window
reaches.
"""

from __future__ import annotations

import weakref
from collections import deque

from vdnn.runtime.residency import ManagedStorage, Residency

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
        self._order.append(weakref.ref(managed))

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
        begin = self._ahead if position < self._last_used else position
        self._last_used = position
        self._lately.append(position)
        for index in range(min(begin, position, len(self._order)) - 1, -1, -1):
            self._ahead = index + 1
            earlier = self._order[index]()
            if earlier is None or earlier.transport is not managed.transport:
                continue
            if not self._reload(earlier):
                return
        self._ahead = 0

    def _reload(self, managed: ManagedStorage) -> bool:
        before = managed.residency
        done = managed.reload_early()
        if not done and self._make_room():
            done = managed.reload_early()
        if managed.residency is not before:
            self._early.append(weakref.ref(managed))
        return done

    def _make_room(self) -> bool:
        """Gives up reloads that the backward has passed by: of a graph that is used in part and lives on."""
        if len(self._lately) < _SAVES_OF_AN_OPERATION:
            return False
        behind = max(self._lately)
        passed = False
        # In the order in which they were issued: those saved last come first, and are passed by first.
        while self._early:
            managed = self._early[0]()
            if managed is not None and managed.residency is Residency.RELOADING:
                if managed.position <= behind:
                    break
                managed.forget_unused_reload()
                passed = True
            self._early.popleft()
        return passed
