"""Virtual time of the simulated device, compared with times worked out by hand."""

from __future__ import annotations

import pytest

from tests.device.device_memory import TO_DEVICE, TO_HOST
from vdnn import _C, errors

MS = 1_000_000
MB = 1_000_000


def device_with(latency_ns: int = 0, duplex: float = 20e9) -> _C.SimDevice:
    link = _C.LinkModel(
        to_host_bytes_per_s=10e9, to_device_bytes_per_s=10e9, duplex_bytes_per_s=duplex, latency_ns=latency_ns
    )
    return _C.SimDevice(moves_bytes=False, link=link)


class Program:
    """Streams and memory of a device on which time passes and no bytes move."""

    def __init__(self, device: _C.SimDevice) -> None:
        self.device = device
        self.compute = device.adopt_stream(0)
        self.out, self.back = device.create_stream("out"), device.create_stream("back")
        self.memory, self.host = device.allocate_device(1 << 30), device.allocate_pinned(1 << 30)

    def copy_out(self, size: int) -> _C.Event:
        self.device.copy_async(self.host, self.memory, size, TO_HOST, self.out)
        return self.device.record(self.out, timing=True)

    def copy_back(self, size: int) -> _C.Event:
        self.device.copy_async(self.memory, self.host, size, TO_DEVICE, self.back)
        return self.device.record(self.back, timing=True)


def test_a_copy_takes_its_latency_and_its_bytes() -> None:
    program = Program(device_with(latency_ns=7_000))
    program.copy_out(100 * MB)  # 100 MB at 10 GB/s: 10 ms
    assert program.device.now_ns(program.out) == 10 * MS + 7_000


def test_copies_overlap_with_computing() -> None:
    program = Program(device_with())
    program.device.advance(program.compute, 5 * MS)
    program.device.wait(program.out, program.device.record(program.compute))
    done = program.copy_out(100 * MB)
    program.device.advance(program.compute, 4 * MS)
    assert program.device.now_ns(program.compute) == 9 * MS
    program.device.wait(program.compute, done)
    assert program.device.now_ns(program.compute) == 15 * MS  # the copy ran from 5 to 15
    assert program.device.stall_ns(program.compute) == 6 * MS
    assert program.device.stall_ns(program.out) == 5 * MS


def test_two_streams_share_one_copy_engine() -> None:
    program = Program(device_with())
    other = program.device.create_stream("other")
    program.copy_out(100 * MB)
    program.device.copy_async(program.host, program.memory, 100 * MB, TO_HOST, other)
    assert program.device.now_ns(other) == 20 * MS


def test_a_full_duplex_link_runs_both_ways_at_full_rate() -> None:
    program = Program(device_with(duplex=20e9))
    program.copy_out(100 * MB)
    program.copy_back(100 * MB)
    assert program.device.now_ns(program.out) == 10 * MS
    assert program.device.now_ns(program.back) == 10 * MS


def test_a_shared_link_gives_the_later_copy_what_is_left() -> None:
    program = Program(device_with(duplex=15e9))
    program.copy_out(100 * MB)  # until 10 ms, at 10 GB/s
    program.copy_back(100 * MB)  # 5 GB/s for 10 ms moves 50 MB; the other 50 MB take 5 ms alone
    assert program.device.now_ns(program.out) == 10 * MS
    assert program.device.now_ns(program.back) == 15 * MS


def test_the_sum_of_both_directions_never_exceeds_the_link() -> None:
    program = Program(device_with(duplex=12e9))
    for _ in range(5):
        program.copy_out(60 * MB)
        program.copy_back(60 * MB)
    end = max(program.device.now_ns(program.out), program.device.now_ns(program.back))
    assert 600 * MB / (end / 1e9) <= 12e9


def test_what_the_host_waited_for_is_in_the_past_of_later_work() -> None:
    program = Program(device_with())
    program.device.synchronize(program.copy_out(100 * MB))
    program.copy_back(10 * MB)
    assert program.device.now_ns(program.back) == 11 * MS


def test_elapsed_time_is_virtual() -> None:
    program = Program(device_with())
    begin = program.device.record(program.out, timing=True)
    assert program.device.elapsed_ns(begin, program.copy_out(30 * MB)) == 3 * MS


def test_the_same_program_takes_the_same_time_under_every_schedule() -> None:
    def run(schedule: _C.Schedule, moves_bytes: bool) -> tuple[int, ...]:
        device = _C.SimDevice(schedule=schedule, seed=3, moves_bytes=moves_bytes)
        compute, out = device.adopt_stream(0), device.create_stream("out")
        memory, host = device.allocate_device(1 << 16), device.allocate_pinned(1 << 16)
        for step in range(20):
            device.advance(compute, 1_000 * step)
            device.wait(out, device.record(compute))
            device.copy_async(host, memory, 1 << 16, TO_HOST, out)
            device.wait(compute, device.record(out))
        times = device.now_ns(compute), device.stall_ns(compute), device.now_ns(out)
        device.close()
        return times

    runs = {run(schedule, moves) for schedule in _C.Schedule.__members__.values() for moves in (True, False)}
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to_host_bytes_per_s": 0.0}, "to_host_bytes_per_s: expected a positive number of bytes per second"),
        ({"to_device_bytes_per_s": float("nan")}, "to_device_bytes_per_s: expected a positive number"),
        ({"duplex_bytes_per_s": float("inf")}, "duplex_bytes_per_s: expected a positive number"),
        ({"duplex_bytes_per_s": 1e9}, "at least the rate of the faster direction alone"),
        ({"latency_ns": -1}, "latency_ns: expected 0 or more, got -1"),
    ],
)
def test_a_link_that_cannot_be_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=message):
        _C.SimDevice(link=_C.LinkModel(**change))


def test_time_does_not_run_backwards() -> None:
    device = _C.SimDevice()
    with pytest.raises(errors.InvalidArgumentError, match="duration_ns: expected 0 or more, got -5"):
        device.advance(device.adopt_stream(0), -5)
