"""Frees the hooks of an engine that no session can enter again, without the garbage collector.

The parts of an engine refer to each other in cycles. Graphs that were saved by its hooks may outlive it, and need these
parts until they are freed. So a packer ends with the last storage that it manages: its references are cut, and whatever
nobody else refers to is freed at once, with its threads and its pinned memory.

[Note: Ends from destructors] An engine and a storage may be freed anywhere, also inside a hook of the same packer and
while another thread runs one. Then the packer ends later: when a session is entered or left.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vdnn.runtime.session.hooks import Packer

_later: deque[Packer] = deque()


def end_with_its_graphs(packer: Packer) -> None:
    """Ends `packer` as soon as it manages nothing that a graph needs. No session enters its engine any more."""
    if packer.saves.in_forked_child:
        return
    _later.append(packer)
    end_what_is_over()


def end_what_is_over() -> None:
    """Ends the packers that were not in a state to be ended before. Never blocks."""
    for _ in range(len(_later)):
        try:
            packer = _later.popleft()
        except IndexError:  # another thread took it
            return
        if packer.saves.in_forked_child:
            continue
        if packer.saves.is_in_hook() or not packer.saves.lock.acquire(blocking=False):
            _later.append(packer)
            continue
        try:
            _end(packer)
        finally:
            packer.saves.lock.release()


def _end(packer: Packer) -> None:
    packer.leave_settled_step()
    living = packer.saves.managed
    if not living:
        packer.cut()
        return
    last = _LivingStorages(packer)
    last.living = {weakref.ref(managed, last.gone) for managed in living}


class _LivingStorages:
    """The storages that a packer without an engine still manages. Their references keep this alive."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self.living: set[weakref.ref[object]] = set()

    def gone(self, reference: weakref.ref[object]) -> None:
        self.living.discard(reference)
        if not self.living:
            end_with_its_graphs(self._packer)
