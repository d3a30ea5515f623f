"""The link probe's arithmetic, order of copies and release of memory, on a device whose copies take a given time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from vdnn._C import CopyDirection
from vdnn.hardware.link_probe import COPIES, measure_link

MIB = 2**20


@dataclass(frozen=True)
class Moment:
    """An event: the time on its stream's clock when it was recorded."""

    ns: int


@dataclass
class Clockwork:
    """A device of two streams with a clock each. A copy advances its stream's clock by bytes over the rate of its
    direction.
    """

    to_host_bytes_per_ns: int
    to_device_bytes_per_ns: int
    fails_after_copies: int | None = None
    clocks: dict[str, int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    next_address: int = 4096
    copies: list[CopyDirection] = field(default_factory=list)

    def create_stream(self, name: str, /) -> str:
        self.clocks[name] = 0
        return name

    def record(self, stream: str, /, timing: bool = False) -> Moment:
        assert timing
        return Moment(self.clocks[stream])

    def wait(self, stream: str, event: Moment, /) -> None:
        self.clocks[stream] = max(self.clocks[stream], event.ns)

    def drain(self, stream: str, /) -> None:
        assert stream in self.clocks

    def elapsed_ns(self, begin: Moment, end: Moment, /) -> int:
        # The host waits for both, so later work starts later on both.
        now_ns = max(self.clocks.values())
        self.clocks = dict.fromkeys(self.clocks, now_ns)
        return end.ns - begin.ns

    def copy_async(self, target: int, source: int, bytes: int, direction: CopyDirection, stream: str, /) -> None:
        assert bytes == self.blocks[target] == self.blocks[source]
        if self.fails_after_copies is not None and len(self.copies) >= self.fails_after_copies:
            raise RuntimeError("the copy was refused")
        self.copies.append(direction)
        to_host = direction == CopyDirection.DEVICE_TO_HOST
        self.clocks[stream] += bytes // (self.to_host_bytes_per_ns if to_host else self.to_device_bytes_per_ns)

    def allocate_pinned(self, bytes: int, /) -> int:
        self.next_address += 4096
        self.blocks[self.next_address] = bytes
        return self.next_address

    def free_pinned(self, address: int, /) -> None:
        del self.blocks[address]

    allocate_device = allocate_pinned
    free_device = free_pinned


def test_each_rate_is_bytes_over_the_devices_own_time() -> None:
    figures = measure_link(Clockwork(16, 8), block_bytes=MIB, repeats=3)
    assert figures.to_host_bytes_per_s == 16_000_000_000
    assert figures.to_device_bytes_per_s == 8_000_000_000


def test_both_ways_counts_until_the_slower_direction_is_done() -> None:
    # The directions share nothing here: the slower one takes bytes/8, and both have copied theirs in that time.
    figures = measure_link(Clockwork(16, 8), block_bytes=MIB, repeats=1)
    assert figures.both_ways_bytes_per_s == 2 * 8_000_000_000


def test_the_figures_name_their_block_and_their_repeats() -> None:
    figures = measure_link(Clockwork(1, 1), block_bytes=2 * MIB, repeats=5)
    assert (figures.block_bytes, figures.repeats) == (2 * MIB, 5)
    assert figures.pinning_ns > 0


def test_every_phase_runs_once_more_than_it_counts() -> None:
    device = Clockwork(1, 1)
    measure_link(device, block_bytes=MIB, repeats=2)
    # (2 + 1) runs of two single directions and of both together.
    assert len(device.copies) == 3 * (COPIES + COPIES + 2 * COPIES)


def test_both_directions_take_turns_when_both_are_busy() -> None:
    device = Clockwork(1, 1)
    measure_link(device, block_bytes=MIB, repeats=1)
    assert device.copies[-2 * COPIES :] == [CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE] * COPIES


@pytest.mark.parametrize("copies", [None, 0, 5, 20])
def test_memory_is_given_back_even_when_a_copy_fails(copies: int | None) -> None:
    device = Clockwork(1, 1, fails_after_copies=copies)
    if copies is None:
        measure_link(device, block_bytes=MIB, repeats=2)
    else:
        with pytest.raises(RuntimeError, match="the copy was refused"):
            measure_link(device, block_bytes=MIB, repeats=2)
    assert device.blocks == {}


def test_progress_names_each_phase() -> None:
    phases: list[str] = []
    measure_link(Clockwork(1, 1), block_bytes=MIB, repeats=1, progress=phases.append)
    assert phases == ["pinning", "device to host", "host to device", "both ways"]
