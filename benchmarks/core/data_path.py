"""Measures the rate of real copies through a TransferQueue on the simulated device, and of a memcpy of the same bytes.

Both sides are host memory and every path ends in memcpy, so a ratio near 1 means that the cost of the queue, the worker
thread and the pool is not visible. Each repeat measures the three in turn, so that other load on the machine affects
all of them. Figures of different runs compare machines, not code.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vdnn import _C

T = TypeVar("T")

# Small copies are timed in trains of this many bytes: a single one would measure the clock and the thread switch.
TRAIN_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class DataPath:
    """Medians over repeats. A ratio is the median of the ratios to memcpy in the same repeat."""

    block_bytes: int
    blocks: int
    memcpy_bytes_per_s: float
    offload_bytes_per_s: float
    reload_bytes_per_s: float
    offload_ratio: float
    reload_ratio: float


class Train:
    """Equal blocks in a row on a simulated device that runs each copy at once. Owns its memory until close()."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = blocks
        self.device = _C.SimDevice(schedule=_C.Schedule.EAGER, poison=False)
        self._compute = self.device.adopt_stream()
        self._pool = _C.PinnedPool(self.device, cap_bytes=4 * self.total_bytes + 2**20)
        # A whole train may be in flight: this does not measure windows.
        self._queue = _C.TransferQueue(self.device, self._pool, offload_window_bytes=2 * self.total_bytes)
        self.source = self.device.allocate_device(self.total_bytes)
        self.target = self.device.allocate_device(self.total_bytes)
        # The same kind of pages as the pool's.
        self._plain = self.device.allocate_pinned(self.total_bytes)
        ctypes.memset(self.source, 0x5A, self.total_bytes)

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.blocks

    def close(self) -> None:
        self._queue.close()
        self._pool.close()
        self.device.close()

    def memcpy(self) -> None:
        for offset in range(0, self.total_bytes, self.block_bytes):
            ctypes.memmove(self._plain + offset, self.source + offset, self.block_bytes)

    def offload(self) -> list[_C.HostCopy]:
        """Offload all blocks. Returns when all bytes are in pinned blocks, which the pool lends again each time."""
        copies = []
        for offset in range(0, self.total_bytes, self.block_bytes):
            copy = self._queue.offload(self.source + offset, self.block_bytes, self._compute)
            assert copy is not None  # the queue's default, Growth.NOW, pins memory or raises
            copies.append(copy)
        self.device.synchronize(self._queue.ready(copies[-1]))
        return copies

    def reload(self, copies: list[_C.HostCopy]) -> None:
        """Reload all blocks. Returns when all bytes are in the target."""
        reloads = []
        for index, copy in enumerate(copies):
            address = self.target + index * self.block_bytes
            reloads.append(self._queue.reload(copy, address, self._compute))
        for reload in reloads:
            self._queue.wait(reload, self._compute)

    def release(self, copies: list[_C.HostCopy]) -> None:
        """Return sources and blocks. This is not timed."""
        for copy in copies:
            self._queue.release(copy)
        self._queue.take_released()


def measure_data_path(block_bytes: int, repeats: int) -> DataPath:
    train = Train(block_bytes, max(1, TRAIN_BYTES // block_bytes))
    try:
        taken = [_one_repeat(train) for _ in range(repeats + 1)][1:]  # the first touches the pages
    finally:
        train.close()
    memcpy, offload, reload = zip(*taken, strict=True)
    return DataPath(
        block_bytes=block_bytes,
        blocks=train.blocks,
        memcpy_bytes_per_s=train.total_bytes / statistics.median(memcpy),
        offload_bytes_per_s=train.total_bytes / statistics.median(offload),
        reload_bytes_per_s=train.total_bytes / statistics.median(reload),
        offload_ratio=statistics.median(plain / through for plain, through, _ in taken),
        reload_ratio=statistics.median(plain / back for plain, _, back in taken),
    )


def _one_repeat(train: Train) -> tuple[float, float, float]:
    """Seconds of memcpy, offload and reload, one after the other."""
    memcpy_s, _ = _timed(train.memcpy)
    offload_s, copies = _timed(train.offload)
    reload_s, _ = _timed(lambda: train.reload(copies))
    train.release(copies)
    return memcpy_s, offload_s, reload_s


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result
