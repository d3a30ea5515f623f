"""Measures the host time of a TransferQueue for each transfer, without the copy itself: submission and wait.

The device only keeps time, so that the rest is our own cost: the call from Python, the pool's lease, the events and the
bookkeeping. An offload is offload() and release(), a reload is reload() and wait(). Batched transfers share one
submission. A queue searches its copies in flight, so the same is also measured with many of them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from vdnn import _C

LARGE_BYTES = 2**20
SMALL_BYTES = 4096
# Transfers between two readings of the clock.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Host time for one transfer, medians over chunks, in nanoseconds."""

    kind: str
    block_bytes: int
    in_flight: int
    offload_ns: int
    reload_ns: int


class QueueWithoutBytes:
    """A queue on a device that moves no bytes, with `in_flight` copies that are never released."""

    def __init__(self, block_bytes: int, in_flight: int) -> None:
        self.block_bytes = block_bytes
        self._device = _C.SimDevice(moves_bytes=False)
        self._compute = self._device.adopt_stream()
        self._pool = _C.PinnedPool(self._device, cap_bytes=2**40)
        self._queue = _C.TransferQueue(self._device, self._pool, offload_window_bytes=2**40)
        self._memory = self._device.allocate_device(block_bytes)
        self._unreleased = [self._submitted() for _ in range(in_flight)]

    def close(self) -> None:
        self._queue.close()
        self._pool.close()
        self._device.close()

    def chunk_ns(self) -> tuple[int, int]:
        """Host time of CHUNK offloads and of CHUNK reloads, each submitted first and waited for after."""
        begin = time.perf_counter_ns()
        copies = [self._submitted() for _ in range(CHUNK)]
        for copy in copies:
            self._queue.release(copy)
        middle = time.perf_counter_ns()
        reloads = [self._queue.reload(copy, self._memory, self._compute) for copy in copies]
        for reload in reloads:
            self._queue.wait(reload, self._compute)
        end = time.perf_counter_ns()
        self._queue.take_released()
        return middle - begin, end - middle

    def _submitted(self) -> _C.HostCopy:
        copy = self._queue.offload(self._memory, self.block_bytes, self._compute)
        assert copy is not None  # the queue's default, Growth.NOW, pins memory or raises
        return copy


def measure_bookkeeping(kind: str, block_bytes: int, in_flight: int, chunks: int) -> Bookkeeping:
    queue = QueueWithoutBytes(block_bytes, in_flight)
    try:
        taken = [queue.chunk_ns() for _ in range(chunks + 2)][2:]  # the first two grow the pool
    finally:
        queue.close()
    return Bookkeeping(
        kind=kind,
        block_bytes=block_bytes,
        in_flight=in_flight,
        offload_ns=round(statistics.median(out for out, _ in taken) / CHUNK),
        reload_ns=round(statistics.median(back for _, back in taken) / CHUNK),
    )


def measure_all_bookkeeping(chunks: int) -> list[Bookkeeping]:
    return [
        measure_bookkeeping("alone", LARGE_BYTES, 0, chunks),
        measure_bookkeeping("alone", LARGE_BYTES, 512, chunks),
        measure_bookkeeping("batched", SMALL_BYTES, 0, chunks),
        measure_bookkeeping("batched", SMALL_BYTES, 512, chunks),
    ]
