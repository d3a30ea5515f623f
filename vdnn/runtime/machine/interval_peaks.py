"""The exact peaks of allocated bytes between two readings of torch's statistics, learned from the allocator's history.

The statistics have one peak, since the user's last reset, and it is not ours to reset. If it did not rise in an
interval, they bound the interval's peak only by all that was allocated in it: both workspaces of a convolution's
backward count, though the first is freed before the second is allocated. The allocator's history has every allocation
and every free in order. So one step is recorded with it, and for each interval the rise from its begin to its peak is
noted. A later interval with the same allocations and frees, in number and in bytes, has the same rise.

[Note: Steps with a history] The first step has one, and a later step if intervals in the step before were unknown, up
to a few times. Nothing is recorded while the user records a history, and nothing is learned unless the history agrees
with the statistics at every reading.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

from vdnn.runtime.torch_internals import allocator_history

_MOST_EVENTS = 1 << 17
_MOST_STEPS = 4
_MOST_KNOWN = 1 << 16


class Reading(NamedTuple):
    """The statistics at one moment, in requested bytes. Totals are since the process began."""

    bytes: int
    allocated_bytes: int
    peak_bytes: int
    allocations: int
    frees: int

    @property
    def events(self) -> int:
        return self.allocations + self.frees


class _Signature(NamedTuple):
    """The allocations and frees of an interval."""

    allocations: int
    frees: int
    allocated_bytes: int
    change_bytes: int


def _signature(before: Reading, now: Reading) -> _Signature:
    return _Signature(
        now.allocations - before.allocations,
        now.frees - before.frees,
        now.allocated_bytes - before.allocated_bytes,
        now.bytes - before.bytes,
    )


class IntervalPeaks:
    """The peaks of one device's intervals. Used under the lock of the hooks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rises: dict[_Signature, int] = {}
        self._steps_left = _MOST_STEPS
        self._has_unknown = True
        self._first: Reading | None = None  # where the history began
        self._intervals: list[tuple[Reading, Reading]] = []  # since then

    def peak_bytes(self, before: Reading, now: Reading) -> int | None:
        """The exact peak of the interval, or None if it is not known."""
        if self._first is not None:
            self._intervals.append((before, now))
        if now.frees == before.frees:
            return now.bytes
        if now.allocations == before.allocations:
            return before.bytes
        rise = self._rises.get(_signature(before, now))
        if rise is None:
            self._has_unknown = self._has_unknown or self._first is None
            return None
        return before.bytes + rise

    def step_begins(self, read: Callable[[], Reading]) -> None:
        """Starts a history if this step needs one. See [Note: Steps with a history]."""
        if self._first is not None or not self._has_unknown or not self._steps_left or allocator_history.is_recorded():
            return
        self._steps_left -= 1
        self._has_unknown = False
        allocator_history.start(_MOST_EVENTS)
        self._first = read()

    def step_ended(self, read: Callable[[], Reading]) -> None:
        """Learns from the history, if there is one, and stops it."""
        first, intervals = self._first, self._intervals
        if first is None:
            return
        self._first, self._intervals = None, []
        now = read()
        try:
            changes = allocator_history.changes(self._device)
        finally:
            allocator_history.stop()
        is_whole = len(changes) == now.events - first.events
        allocated = list(accumulate(changes, initial=first.bytes))
        self._has_unknown = not (is_whole and self._learn(first, intervals, allocated))

    def _learn(self, first: Reading, intervals: list[tuple[Reading, Reading]], allocated: list[int]) -> bool:
        """`allocated` are the bytes after each event since `first`. False if they do not agree with the readings."""
        rises: dict[_Signature, int] = {}
        for before, now in intervals:
            begin, end = before.events - first.events, now.events - first.events
            if not 0 <= begin <= end < len(allocated) or (allocated[begin], allocated[end]) != (
                before.bytes,
                now.bytes,
            ):
                return False  # the totals were reset, or an event came between a reading and the history's ends
            signature = _signature(before, now)
            rises[signature] = max(rises.get(signature, 0), max(allocated[begin : end + 1]) - before.bytes)
        if len(self._rises) + len(rises) > _MOST_KNOWN:
            self._rises.clear()
        for signature, rise in rises.items():
            self._rises[signature] = max(self._rises.get(signature, 0), rise)
        return True
