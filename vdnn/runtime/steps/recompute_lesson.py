"""The part of a step's lesson that is about recomputes: which saves a recompute reads, and what is encoded where.

A recipe finds what it reads through the nodes of the graph. It also has to know the settings of torch
under which each node ran: from a save of that node, or from the saves before and after it. So Python notes all of
these saves in a settled step and reads the settings there. A recipe is then as exact as without the gate.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.watched_lifetime import StepObserver
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


class EncodedSave(NamedTuple):
    """Encoded bytes, which are a save of the plan and none of the program."""

    key: SaveKey
    planned: int  # the lifetime in the plan


class RecomputeLesson:
    """Learns about the recomputes of one step. Events are numbered as in its script."""

    def __init__(self, step: StepObserver) -> None:
        self._step = step
        self.read: set[int] = set()  # lifetimes that a recompute reads or finds
        self._discarding: list[weakref.ref[ManagedStorage]] = []  # to be discarded once that is possible
        self._encoded: list[EncodedSave] = []  # since the last event
        self._saves: list[tuple[int, int]] = []  # the sequence number of the node, and the event
        self._nodes: set[int] = set()  # of the recipes

    def encoded(self, key: SaveKey, planned: int) -> None:
        """Bytes were encoded, and the plan has a lifetime for them."""
        self._encoded.append(EncodedSave(key, planned))

    def take_encoded(self) -> tuple[EncodedSave, ...]:
        """Those that were encoded since the last call."""
        taken = tuple(self._encoded)
        self._encoded.clear()
        return taken

    def saved(self, event: int) -> None:
        """The running node saved something that is not small: the settings of torch were read."""
        self._saves.append((_sequence_nr() - 1, event))

    def begins(self, managed: ManagedStorage) -> None:
        """A lifetime begins."""
        if managed.action in (Action.RECOMPUTE, Action.COMPRESS):
            self._discarding.append(managed.reference)

    def look(self, own: ManagedStorage | None = None) -> bool:
        """Notes what the recipes read of all that was discarded since the last call. True if there was any beside
        `own`."""
        found = False
        for reference in self._discarding[:]:
            managed = reference()
            discarded = None if managed is None else managed.discarded
            if managed is not None and discarded is None:
                continue
            self._discarding.remove(reference)
            if discarded is not None:
                found |= managed is not own
                self._nodes.update(discarded.nodes)
                operands = [operand.managed for operand in discarded.operands]
                self.read |= self._numbers_of([one for one in operands if isinstance(one, ManagedStorage)])
        return found

    def _numbers_of(self, operands: list[ManagedStorage]) -> set[int]:
        all_watched = [one.watched for one in operands]
        return {
            one.number
            for one in all_watched
            if one is not None and one.observer is self._step and one.number is not None
        }

    def unseen(self, is_handled: Callable[[int], bool]) -> list[int]:
        """Saves at which the settings of torch have to be read, and which Python does not handle anyway."""
        saves = sorted(self._saves)
        found: list[int] = []
        for node in self._nodes:
            first, end = bisect_left(saves, (node, -1)), bisect_left(saves, (node + 1, -1))
            own = [event for _, event in saves[first:end]]
            around = [event for _, event in (*saves[max(0, first - 1) : first], *saves[end : end + 1])]
            if own:
                around = [] if any(map(is_handled, own)) else own[:1]
            found += [event for event in around if not is_handled(event)]
        return found
