"""Measures the link between a device and its host: each direction alone, both at once, and the cost of pinning.

The probe works on any device with the calls of LinkDevice and needs no torch. It times with the device's own events, so
that other work of the host does not count. The figures are medians of whole-block copies from and to pinned memory:
a transfer queue with large blocks can reach them, small copies cannot. The probe owns all memory and both streams that
it uses. It frees the memory before it returns or raises; the streams live as long as the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from vdnn._C import CopyDirection
from vdnn.hardware import LinkFigures

BLOCK_BYTES = 64 * 2**20
REPEATS = 7
# Copies in one timed run. There are several because with two directions the first and the last copy run partly alone.
COPIES = 4

S = TypeVar("S")
E = TypeVar("E")


class LinkDevice(Protocol[S, E]):
    """The calls of a device that the probe makes. vdnn._C documents each."""

    def create_stream(self, name: str, /) -> S: ...
    def record(self, stream: S, /, timing: bool = ...) -> E: ...
    def wait(self, stream: S, event: E, /) -> None: ...
    def drain(self, stream: S, /) -> None: ...
    def elapsed_ns(self, begin: E, end: E, /) -> int: ...
    def copy_async(self, target: int, source: int, bytes: int, direction: CopyDirection, stream: S, /) -> None: ...
    def allocate_pinned(self, bytes: int, /) -> int: ...
    def free_pinned(self, address: int, /) -> None: ...
    def allocate_device(self, bytes: int, /) -> int: ...
    def free_device(self, address: int, /) -> None: ...


def measure_link(
    device: LinkDevice[S, E],
    *,
    block_bytes: int = BLOCK_BYTES,
    repeats: int = REPEATS,
    progress: Callable[[str], None] | None = None,
) -> LinkFigures:
    """Measure the link of `device`. Blocks for about a second; takes two blocks on the device and three on the host."""
    tell = progress if progress is not None else _say_nothing
    tell("pinning")
    pinning_ns = _median(lambda: _pinning_ns(device, block_bytes), repeats)
    with _Lanes(device, block_bytes) as lanes:
        tell("device to host")
        to_host_ns = _median(lambda: lanes.one_way_ns(lanes.to_host), repeats)
        tell("host to device")
        to_device_ns = _median(lambda: lanes.one_way_ns(lanes.to_device), repeats)
        tell("both ways")
        both_ns = _median(lanes.both_ways_ns, repeats)
    moved = block_bytes * COPIES
    return LinkFigures(
        block_bytes=block_bytes,
        repeats=repeats,
        to_host_bytes_per_s=_per_second(moved, to_host_ns),
        to_device_bytes_per_s=_per_second(moved, to_device_ns),
        both_ways_bytes_per_s=_per_second(2 * moved, both_ns),
        pinning_ns=pinning_ns,
    )


@dataclass(frozen=True, slots=True)
class _Lane(Generic[S]):
    """One direction: its stream and the two blocks that it copies between."""

    stream: S
    direction: CopyDirection
    target: int
    source: int


class _Lanes(Generic[S, E]):
    """A context manager that owns the blocks of both directions. On exit it drains the streams and frees the blocks."""

    to_host: _Lane[S]
    to_device: _Lane[S]

    def __init__(self, device: LinkDevice[S, E], block_bytes: int) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._pinned: list[int] = []
        self._on_device: list[int] = []
        self._streams: list[S] = []

    def __enter__(self) -> _Lanes[S, E]:
        try:
            for _ in range(2):
                self._pinned.append(self._device.allocate_pinned(self._block_bytes))
                self._on_device.append(self._device.allocate_device(self._block_bytes))
            self._streams += [self._device.create_stream(f"link probe {way}") for way in ("d2h", "h2d")]
        except BaseException:
            self._free_blocks()
            raise
        (host_a, host_b), (device_a, device_b) = self._pinned, self._on_device
        self.to_host = _Lane(self._streams[0], CopyDirection.DEVICE_TO_HOST, host_a, device_a)
        self.to_device = _Lane(self._streams[1], CopyDirection.HOST_TO_DEVICE, device_b, host_b)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free_blocks()

    def one_way_ns(self, lane: _Lane[S]) -> int:
        begin = self._device.record(lane.stream, timing=True)
        self._copy(lane)
        return self._device.elapsed_ns(begin, self._device.record(lane.stream, timing=True))

    def both_ways_ns(self) -> int:
        """The time from the moment at which both streams may start until the later one is done."""
        begin = self._device.record(self.to_host.stream, timing=True)
        self._device.wait(self.to_device.stream, begin)
        # Submit alternately. Otherwise the second direction starts late, by the time that the host takes to submit the
        # copies of the first.
        for _ in range(COPIES):
            self._copy(self.to_host, copies=1)
            self._copy(self.to_device, copies=1)
        ends = [self._device.record(lane.stream, timing=True) for lane in (self.to_host, self.to_device)]
        return max(self._device.elapsed_ns(begin, end) for end in ends)

    def _copy(self, lane: _Lane[S], copies: int = COPIES) -> None:
        for _ in range(copies):
            self._device.copy_async(lane.target, lane.source, self._block_bytes, lane.direction, lane.stream)

    def _free_blocks(self) -> None:
        for stream in self._streams:
            self._device.drain(stream)
        while self._pinned:
            self._device.free_pinned(self._pinned.pop())
        while self._on_device:
            self._device.free_device(self._on_device.pop())


def _pinning_ns(device: LinkDevice[S, E], block_bytes: int) -> int:
    begin_ns = time.perf_counter_ns()
    address = device.allocate_pinned(block_bytes)
    pinning_ns = time.perf_counter_ns() - begin_ns
    device.free_pinned(address)
    return pinning_ns


def _median(measure_ns: Callable[[], int], repeats: int) -> int:
    """The median of `repeats` runs, after one warm-up run that touches pages and loads code."""
    measure_ns()
    return int(statistics.median(measure_ns() for _ in range(repeats)))


def _per_second(moved_bytes: int, taken_ns: int) -> int:
    return moved_bytes * 10**9 // max(taken_ns, 1)


def _say_nothing(_: str) -> None:
    pass
