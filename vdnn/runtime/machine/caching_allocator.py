"""A model of torch's caching allocator: how much of the card it reserves for the memory that a program allocates.

Torch takes memory from CUDA in segments and keeps them. A block of a segment is split where it is larger than what is
asked for, and merged with free neighbours when it is freed; a segment serves one stream and one of two pools. Memory
that is reserved and not allocated is cached, and fragmented where nothing that is asked for fits it. The rules are
those of c10/cuda/CUDACachingAllocator.cpp with its default settings:

  rounding    requests are rounded up to 512 bytes
  pools       requests of up to 1 MiB come from segments of 2 MiB; larger ones from segments of 20 MiB, or, from 10 MiB
              on, from a segment of their own size, rounded up to 2 MiB
  fit         the smallest free block of the stream and pool that is large enough
  split       what is left of a block is split off from 512 bytes on in small segments, and above 1 MiB in large ones
  pressure    if CUDA has no memory left, all segments without an allocated block are returned, once

With expandable segments, each stream and pool has one segment that grows at its end, by 2 MiB or 20 MiB, and blocks are
split in it from 512 bytes on. Under pressure, the whole granules of free blocks are returned, and taken back where the
block is allocated again.

Not modelled: `record_stream`, memory pools of graphs, and settings other than `expandable_segments`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

_MIN_BLOCK = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20
_ROUND_OWN_SEGMENT = 2 << 20


@dataclass(slots=True, eq=False)
class _Stretch:
    """A block: a stretch of a segment, with its neighbours. The last block of an expandable segment can grow."""

    start: int
    nbytes: int
    pool: _Pool
    is_free: bool = True
    unmapped: int = 0  # bytes that were returned to CUDA: of a free block of an expandable segment
    before: _Stretch | None = None
    after: _Stretch | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one stream and one kind of segments, by size and then by address."""

    is_small: bool
    free: list[tuple[int, int, _Stretch]] = field(default_factory=list)
    last: _Stretch | None = None  # of the expandable segment

    @property
    def granule(self) -> int:
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT

    def add(self, block: _Stretch) -> None:
        bisect.insort(self.free, (block.nbytes, block.start, block))

    def remove(self, block: _Stretch) -> None:
        del self.free[bisect.bisect_left(self.free, (block.nbytes, block.start))]


class CachingAllocator:
    """Replays allocations and frees, each named by a key. `limit_bytes` is the memory that CUDA has; None means no
    limit.

    `failures` counts the allocations that found no memory. They are reserved all the same, so that the replay can
    continue.
    """

    def __init__(self, *, expandable: bool = False, limit_bytes: int | None = None) -> None:
        self._expandable = expandable
        self._limit_bytes = limit_bytes
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[object, _Stretch] = {}
        self._end = 0  # the address after all segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.failures = 0

    def allocate(self, key: object, nbytes: int, stream: int = 0) -> None:
        if not nbytes:
            return
        wanted = -(-nbytes // _MIN_BLOCK) * _MIN_BLOCK
        is_small = wanted <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = self._cached(pool, wanted) or self._reserve(pool, wanted)
        self._split(block, wanted)
        block.is_free = False
        self._blocks[key] = block
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: object) -> None:
        block = self._blocks.pop(key, None)
        if block is None:  # of no bytes
            return
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        pool, before, after = block.pool, block.before, block.after
        if after is not None and after.is_free:
            pool.remove(after)
            self._join(block, after)
        if before is not None and before.is_free:
            pool.remove(before)
            self._join(before, block)
            block = before
        pool.add(block)

    def empty_cache(self) -> None:
        """Returns to CUDA what is reserved and not needed, as torch.cuda.empty_cache() does."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.nbytes

    def reset_peak(self) -> None:
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def _cached(self, pool: _Pool, wanted: int) -> _Stretch | None:
        place = bisect.bisect_left(pool.free, (wanted,))
        if place == len(pool.free):
            return None
        # The last block of an expandable segment counts as larger than any other: it can grow.
        if pool.free[place][2] is pool.last and place + 1 < len(pool.free):
            place += 1
        return pool.free.pop(place)[2]

    def _reserve(self, pool: _Pool, wanted: int) -> _Stretch:
        if self._expandable:
            return self._expand(pool, wanted)
        if pool.is_small:
            nbytes = _SMALL_SEGMENT
        elif wanted < _MIN_OWN_SEGMENT:
            nbytes = _LARGE_SEGMENT
        else:
            nbytes = -(-wanted // _ROUND_OWN_SEGMENT) * _ROUND_OWN_SEGMENT
        self._take(nbytes)
        block = _Stretch(self._end, nbytes, pool)
        self._end += nbytes
        return block

    def _expand(self, pool: _Pool, wanted: int) -> _Stretch:
        last = pool.last
        if last is not None and last.is_free:
            pool.remove(last)
            more = -(-(wanted - last.nbytes) // pool.granule) * pool.granule
            last.nbytes += more
            self._take(more)
            return last
        nbytes = -(-wanted // pool.granule) * pool.granule
        self._take(nbytes)
        block = _Stretch(0 if last is None else last.start + last.nbytes, nbytes, pool, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        return block

    def _take(self, nbytes: int) -> None:
        """Takes memory from CUDA."""
        limit = self._limit_bytes
        if limit is not None and self.reserved_bytes + nbytes > limit:
            self.empty_cache()
            self.failures += self.reserved_bytes + nbytes > limit
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: _Stretch, wanted: int) -> None:
        left = block.nbytes - wanted
        if left < _MIN_BLOCK or (left <= _SMALL and not block.pool.is_small and not self._expandable):
            self._map(block, 0)
            return
        rest = _Stretch(block.start + wanted, left, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.nbytes, block.after = wanted, rest
        if block.pool.last is block:
            block.pool.last = rest
        rest.unmapped = min(block.unmapped, _whole_granules(rest))
        self._map(block, rest.unmapped)
        block.pool.add(rest)

    def _map(self, block: _Stretch, but_bytes: int) -> None:
        """Takes back the part of a block that was returned to CUDA, except for the bytes that another block has now."""
        missing, block.unmapped = block.unmapped - but_bytes, 0
        if missing:
            self._take(missing)

    def _join(self, first: _Stretch, second: _Stretch) -> None:
        first.nbytes += second.nbytes
        first.unmapped += second.unmapped
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.pool.last is second:
            first.pool.last = first

    def _unmap(self, block: _Stretch) -> None:
        whole = _whole_granules(block)
        self.reserved_bytes -= whole - block.unmapped
        block.unmapped = whole


def _whole_granules(block: _Stretch) -> int:
    granule = block.pool.granule
    return max(0, (block.start + block.nbytes) // granule * granule - -(-block.start // granule) * granule)
