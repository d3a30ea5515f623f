"""The schedules of the simulated device: as early, as late and as randomly as is legal, and repeatable."""

from __future__ import annotations

import pytest

from tests.device.device_memory import TO_HOST, fill_host, pattern, read_host
from vdnn import _C

SIZE = 4096


def copy_out(device: _C.SimDevice) -> tuple[int, int, _C.Event]:
    stream = device.create_stream("out")
    memory, host = device.allocate_device(SIZE), device.allocate_pinned(SIZE)
    fill_host(memory, pattern(SIZE, 1))
    device.copy_async(host, memory, SIZE, TO_HOST, stream)
    return memory, host, device.record(stream)


def test_a_lazy_copy_reads_its_source_only_when_somebody_needs_it() -> None:
    device = _C.SimDevice(schedule=_C.Schedule.LAZY)
    memory, host, event = copy_out(device)
    fill_host(memory, pattern(SIZE, 2))  # a writer that did not wait for the copy
    device.synchronize(event)
    assert read_host(host, SIZE) == pattern(SIZE, 2)


def test_an_eager_copy_runs_without_being_asked() -> None:
    device = _C.SimDevice(schedule=_C.Schedule.EAGER)
    memory, host, event = copy_out(device)
    while not device.query(event):
        pass
    fill_host(memory, pattern(SIZE, 2))
    assert read_host(host, SIZE) == pattern(SIZE, 1)


def test_a_wait_of_the_compute_stream_makes_a_lazy_copy_run() -> None:
    device = _C.SimDevice(schedule=_C.Schedule.LAZY)
    memory, host, event = copy_out(device)
    device.wait(device.adopt_stream(0), event)
    fill_host(memory, pattern(SIZE, 2))
    assert read_host(host, SIZE) == pattern(SIZE, 1)


def test_forcing_a_stream_forces_what_it_waits_for() -> None:
    device = _C.SimDevice(schedule=_C.Schedule.LAZY)
    _, host, event = copy_out(device)
    second = device.create_stream("second")
    third = device.create_stream("third")
    device.wait(second, event)
    device.wait(third, device.record(second))
    device.drain(third)
    assert read_host(host, SIZE) == pattern(SIZE, 1)


def test_released_memory_is_poisoned_in_stream_order() -> None:
    device = _C.SimDevice(schedule=_C.Schedule.LAZY)
    compute = device.adopt_stream(0)
    memory = device.allocate_device(SIZE)
    fill_host(memory, pattern(SIZE))
    device.note_access(memory, SIZE, _C.Access.READ, compute)
    assert read_host(memory, SIZE) == pattern(SIZE)
    device.note_access(memory, SIZE, _C.Access.RELEASE, compute)
    assert read_host(memory, SIZE) == b"\xff" * SIZE
    stream = device.create_stream("s")
    fill_host(memory, pattern(SIZE))
    device.note_access(memory, SIZE, _C.Access.RELEASE, stream)
    assert read_host(memory, SIZE) == pattern(SIZE)
    device.drain(stream)
    assert read_host(memory, SIZE) == b"\xff" * SIZE


def test_poisoning_can_be_turned_off() -> None:
    device = _C.SimDevice(poison=False)
    memory = device.allocate_device(SIZE)
    fill_host(memory, pattern(SIZE))
    device.note_access(memory, SIZE, _C.Access.RELEASE, device.adopt_stream(0))
    assert read_host(memory, SIZE) == pattern(SIZE)


def raced_copies(seed: int) -> list[bool]:
    """Says which of 64 copies, each raced by a writer that does not wait, ran after the writer."""
    device = _C.SimDevice(schedule=_C.Schedule.RANDOM, seed=seed)
    stream = device.create_stream("out")
    memories = [device.allocate_device(64) for _ in range(64)]
    host = device.allocate_pinned(64 * 64)
    for index, memory in enumerate(memories):
        fill_host(memory, b"\x01" * 64)
        device.copy_async(host + 64 * index, memory, 64, TO_HOST, stream)
        fill_host(memory, b"\x02" * 64)
    device.drain(stream)
    copied = read_host(host, 64 * 64)
    device.close()
    return [copied[64 * index] == 2 for index in range(64)]


def test_random_schedules_run_some_copies_at_once_and_hold_others_back() -> None:
    late = sorted(sum(raced_copies(seed)) for seed in range(32))
    # A stream has one temperament for its lifetime: it hurries, stops, or runs in between.
    assert late[0] < 16, late
    assert late[-1] == 64, late
    assert len([count for count in late if 16 <= count < 64]) >= 8, late


def test_a_random_schedule_holds_one_stream_back_and_hurries_another() -> None:
    def run_by_then(seed: int) -> tuple[int, ...]:
        """Counts how many of 64 copies each of two streams has run when all have been issued."""
        device = _C.SimDevice(schedule=_C.Schedule.RANDOM, seed=seed)
        streams = [device.create_stream("left"), device.create_stream("right")]
        memory, host = device.allocate_device(64), device.allocate_pinned(2 * 64)
        fill_host(memory, b"\x01" * 64)
        fill_host(host, b"\x02" * 128)
        for index in range(64):
            for side, stream in enumerate(streams):
                device.copy_async(host + 64 * side + index, memory, 1, TO_HOST, stream)
        copied = read_host(host, 2 * 64)
        device.close()
        return copied[:64].count(1), copied[64:].count(1)

    ahead = [left - right for left, right in map(run_by_then, range(48))]
    assert max(ahead) > 48, ahead
    assert min(ahead) < -48, ahead
    assert min(map(abs, ahead)) < 4, ahead


def test_a_random_schedule_is_repeated_by_its_seed() -> None:
    assert raced_copies(seed=11) == raced_copies(seed=11)
    assert raced_copies(seed=11) != raced_copies(seed=12)


def test_without_bytes_only_time_passes() -> None:
    device = _C.SimDevice(moves_bytes=False, schedule=_C.Schedule.LAZY)
    stream = device.create_stream("out")
    size = 1 << 40  # more than any machine has
    memory, host = device.allocate_device(size), device.allocate_pinned(size)
    device.copy_async(host, memory, size, TO_HOST, stream)
    event = device.record(stream, timing=True)
    assert not device.query(event)
    device.synchronize(event)
    assert device.query(event)
    assert device.now_ns(stream) > 60_000_000_000
    device.free_pinned(host)
    device.free_device(memory)


@pytest.mark.parametrize("schedule", [_C.Schedule.LAZY, _C.Schedule.RANDOM])
def test_a_device_dropped_with_work_in_flight_neither_hangs_nor_runs_it(schedule: _C.Schedule) -> None:
    device = _C.SimDevice(schedule=schedule)
    copy_out(device)
    del device
