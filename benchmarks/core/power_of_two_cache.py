"""A model of PyTorch's cache of pinned memory, to compare the pool with.

Source: aten/src/ATen/core/CachingHostAllocator.h in PyTorch, as of 2.13, with its default settings: allocate() rounds
each request up to a power of two (`PowerOf2Ceil`), looks for a free block of exactly that size (`get_free_block`, one
list for each power) and else pins a new one. It never splits, joins or releases a block. The model is generous: a block
is free again at once, whereas the real cache waits for its events.
"""

from __future__ import annotations

from collections import Counter

from benchmarks.core.allocation_sequences import Allocation, Sequenced


class PowerOfTwoCache:
    """Counts the bytes that the cache would pin. Holds no memory."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self._free: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def allocate(self, block: int, requested_bytes: int) -> None:
        size = 1 << (requested_bytes - 1).bit_length()
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.pinned_bytes += size
        self._sizes[block] = size

    def free(self, block: int) -> None:
        self._free[self._sizes.pop(block)] += 1


def pinned_by_cache_bytes(sequence: Sequenced) -> int:
    """The bytes that the cache has pinned at the end of a sequence, which is also its peak."""
    cache = PowerOfTwoCache()
    for item in sequence:
        if isinstance(item, Allocation):
            cache.allocate(item.block, item.bytes)
        else:
            cache.free(item.block)
    return cache.pinned_bytes
