"""Room at every interval of a step, in blocks: taking it downwards from an interval goes by whole blocks where it can.

Plans with thousands of storages take room over millions of intervals; this is what keeps a policy that tries hundreds
of plans in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 32


class Room:
    """Bytes for each interval; may be negative."""

    def __init__(self, room_bytes: Sequence[int]) -> None:
        self._bytes = list(room_bytes)
        self._taken = [0] * (len(self._bytes) // _BLOCK + 1)  # of each interval of a block
        self._least = [min(self._bytes[begin : begin + _BLOCK], default=0) for begin in self._begins()]

    def take_down(self, highest: int, lowest: int, nbytes: int) -> int:
        """Takes so much from `highest` on, downwards as long as there is as much, at most to `lowest`. Returns the
        interval below the last that it was taken from: `highest` itself if that has not enough."""
        interval = highest
        while interval >= lowest:
            block = interval // _BLOCK
            begin = block * _BLOCK
            if interval == begin + _BLOCK - 1 and begin >= lowest and self._least[block] >= nbytes:
                self._taken[block] += nbytes
                self._least[block] -= nbytes
                interval = begin - 1
                continue
            if self._bytes[interval] - self._taken[block] < nbytes:
                break
            self._bytes[interval] -= nbytes
            self._least[block] = min(self._least[block], self._bytes[interval] - self._taken[block])
            interval -= 1
        return interval

    def at(self, interval: int) -> int:
        return self._bytes[interval] - self._taken[interval // _BLOCK]

    def _begins(self) -> range:
        return range(0, len(self._taken) * _BLOCK, _BLOCK)
