"""Under which settings of torch an operation ran: known at its saves, or between two looks that saw the same.

Settings may be changed around a single operation, and a recipe may reach back over many. `observe_flags` looks at
them at saves and around modules, and notes them with autograd's sequence number, for each thread: a save belongs to
the node that was made last. Nodes between two looks that differ ran under nobody knows which.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch

from vdnn.runtime.recompute.backend_flags import Flags, backend_flags
from vdnn.runtime.recompute.operation import Node

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_EPOCHS = 64  # that a thread remembers
_SAVES = 1 << 13  # nodes whose saves a thread remembers
_LAST = _SAVES - 1
_AMBIGUOUS = -1


class _Epoch(NamedTuple):
    """Nodes from `begin` on ran under `flags`; those from `unsure_from` to there under these or those before."""

    unsure_from: int
    begin: int
    flags: Flags


class _Thread(threading.local):
    """What one thread has seen. `nodes` and `epochs_of` are rings: the nodes with a save, and its epoch."""

    def __init__(self) -> None:
        self.flags: Flags | None = None
        self.last = 0
        self.number = -1  # of the newest epoch
        self.epochs: dict[int, _Epoch] = {}
        self.nodes = array("q", [-1]) * _SAVES
        self.epochs_of = array("q", [_AMBIGUOUS]) * _SAVES


_here = _Thread()


def observe_flags(*, at_save: bool = False) -> None:
    """Look at the settings. `at_save`: inside a pack hook, whose node is the last that was made."""
    here = _here
    now = _sequence_nr()
    flags = backend_flags()
    if flags != here.flags:
        here.number += 1
        here.epochs[here.number] = _Epoch(here.last, now, flags)
        here.epochs.pop(here.number - _EPOCHS, None)
        here.flags = flags
    here.last = now
    if at_save and now:
        place = (now - 1) & _LAST
        if here.nodes[place] != now - 1:
            here.nodes[place], here.epochs_of[place] = now - 1, here.number
        elif here.epochs_of[place] != here.number:
            here.epochs_of[place] = _AMBIGUOUS


def flags_of(node: Node, *, at_save: bool) -> Flags | None:
    """Under which `node`'s operation ran on this thread, if that is known. `at_save`: only by a save of its own."""
    here = _here
    made = node._sequence_nr()
    place = made & _LAST
    if here.nodes[place] == made:
        epoch = here.epochs.get(here.epochs_of[place])
        return None if epoch is None else epoch.flags
    if at_save:
        return None
    unsure_from = here.last
    for epoch in reversed(here.epochs.values()):
        if made >= unsure_from:
            return None
        if made >= epoch.begin:
            return epoch.flags
        unsure_from = epoch.unsure_from
    return None
