"""Remembers the settings of torch under which operations ran.

A program may change settings around a single operation, and a recipe may reach back over many. `observe_flags` reads
them at saves and around modules, and notes them with autograd's sequence number, for each thread. A save belongs to
the node that was created last. The settings of a node without a save are known if the readings before and after it
agree, and if they were read at the boundaries of module calls next to it; otherwise `flags_of` returns None.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch

from vdnn._C import settings_were_read, settings_were_read_around
from vdnn.runtime.recompute.backend_flags import Flags, backend_flags
from vdnn.runtime.recompute.operation import Node

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_EPOCHS = 64  # epochs that a thread remembers
_SAVES = 1 << 13  # nodes whose saves a thread remembers
_LAST = _SAVES - 1
_AMBIGUOUS = -1


class _Epoch(NamedTuple):
    """Nodes from `begin` on ran under `flags`. Nodes from `unsure_from` to `begin` ran under these or the previous."""

    unsure_from: int
    begin: int
    flags: Flags


class _Thread(threading.local):
    """The observations of one thread. `nodes` and `epochs_of` are ring buffers: nodes with a save, and its epoch."""

    def __init__(self) -> None:
        self.flags: Flags | None = None
        self.last = 0
        self.saved_at = 0  # the last reading at a save
        self.number = -1  # number of the newest epoch
        self.epochs: dict[int, _Epoch] = {}
        self.nodes = array("q", [-1]) * _SAVES
        self.epochs_of = array("q", [_AMBIGUOUS]) * _SAVES


_this_thread = _Thread()


def observe_flags(*, at_save: bool = False) -> None:
    """Read the settings. `at_save`: called in a pack hook, whose node is the last that was created."""
    thread = _this_thread
    now = _sequence_nr()
    if at_save:
        if now == thread.saved_at and now == thread.last:
            return  # another save of the same node, whose operation still runs
        thread.saved_at = now
    flags = backend_flags()
    if flags is not thread.flags and flags != thread.flags:
        thread.number += 1
        thread.epochs[thread.number] = _Epoch(thread.last, now, flags)
        thread.epochs.pop(thread.number - _EPOCHS, None)
        thread.flags = flags
    thread.last = now
    settings_were_read(now)
    if at_save and now:
        slot = (now - 1) & _LAST
        if thread.nodes[slot] != now - 1:
            thread.nodes[slot], thread.epochs_of[slot] = now - 1, thread.number
        elif thread.epochs_of[slot] != thread.number:
            thread.epochs_of[slot] = _AMBIGUOUS


def flags_of(node: Node, *, at_save: bool) -> Flags | None:
    """The settings under which `node`'s operation ran on this thread, or None if they are not known. `at_save`: only a
    save of the node itself counts."""
    thread = _this_thread
    number = node._sequence_nr()
    slot = number & _LAST
    if thread.nodes[slot] == number:
        epoch = thread.epochs.get(thread.epochs_of[slot])
        return None if epoch is None else epoch.flags
    if at_save or not settings_were_read_around(number):
        return None
    unsure_from = thread.last
    for epoch in reversed(thread.epochs.values()):
        if number >= unsure_from:
            return None
        if number >= epoch.begin:
            return epoch.flags
        unsure_from = epoch.unsure_from
    return None


def were_observed_at_save(number: int) -> bool:
    """True if the node with this number saved something itself, on this thread, where the settings were read."""
    return _this_thread.nodes[number & _LAST] == number
