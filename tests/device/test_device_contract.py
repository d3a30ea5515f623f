"""The contract of every Device (csrc/device/device.h), run unchanged over all implementations."""

from __future__ import annotations

import ctypes
import gc

import pytest

from tests.device.device_memory import TO_DEVICE, TO_HOST, download, fill_host, pattern, read_host, upload
from vdnn import _C, errors

SIZE = 100_003  # odd, larger than a page


def test_bytes_survive_the_way_to_the_host_and_back(device: _C.Device) -> None:
    out, back = device.create_stream("out"), device.create_stream("back")
    first, second = device.allocate_device(SIZE), device.allocate_device(SIZE)
    host = device.allocate_pinned(SIZE)
    content = pattern(SIZE)
    upload(device, out, first, content)

    device.copy_async(host, first, SIZE, TO_HOST, out)
    device.wait(back, device.record(out))
    device.copy_async(second, host, SIZE, TO_DEVICE, back)
    device.synchronize(device.record(back))

    assert read_host(host, SIZE) == content
    assert download(device, back, second, SIZE) == content


def test_work_on_one_stream_runs_in_order(device: _C.Device) -> None:
    stream = device.create_stream("s")
    memory = device.allocate_device(SIZE)
    sources = [device.allocate_pinned(SIZE) for _ in range(4)]
    for seed, source in enumerate(sources):
        fill_host(source, pattern(SIZE, seed))
        device.copy_async(memory, source, SIZE, TO_DEVICE, stream)
    assert download(device, stream, memory, SIZE) == pattern(SIZE, 3)


def test_a_wait_refers_to_the_record_that_made_the_event(device: _C.Device) -> None:
    """A later record of the stream must neither delay an earlier wait nor dead-lock it."""
    writer, reader = device.create_stream("writer"), device.create_stream("reader")
    memory, host = device.allocate_device(SIZE), device.allocate_pinned(SIZE)
    target = device.allocate_pinned(SIZE)
    fill_host(host, pattern(SIZE))
    device.copy_async(memory, host, SIZE, TO_DEVICE, writer)
    first = device.record(writer)
    device.wait(reader, first)
    device.copy_async(target, memory, SIZE, TO_HOST, reader)
    read = device.record(reader)
    device.wait(writer, read)  # the writer waits for the reader, which waits for an earlier record of the writer
    later = device.record(writer)
    device.synchronize(later)
    assert device.query(first)
    assert read_host(target, SIZE) == pattern(SIZE)


def test_an_event_that_was_synchronised_with_has_happened(device: _C.Device) -> None:
    stream = device.create_stream("s")
    memory, host = device.allocate_device(SIZE), device.allocate_pinned(SIZE)
    device.copy_async(host, memory, SIZE, TO_HOST, stream)
    event = device.record(stream)
    device.synchronize(event)
    assert device.query(event)
    assert event.stream == stream


def test_polling_an_event_ends(device: _C.Device) -> None:
    stream = device.create_stream("s")
    memory, host = device.allocate_device(SIZE), device.allocate_pinned(SIZE)
    device.copy_async(host, memory, SIZE, TO_HOST, stream)
    event = device.record(stream)
    if "Fake" in device.info.name:
        device.synchronize(event)  # while held, the fake driver does not run for a query, and neither does a GPU
    for _ in range(1_000_000):
        if device.query(event):
            return
    pytest.fail("the event never happened")


def test_an_empty_event_has_happened(device: _C.Device) -> None:
    stream = device.create_stream("s")
    empty = _C.Event()
    assert empty.empty
    assert empty.stream is None
    assert device.query(empty)
    device.synchronize(empty)
    device.wait(stream, empty)


def test_a_native_handle_names_one_stream(device: _C.Device) -> None:
    assert device.adopt_stream(0) == device.adopt_stream(0)
    assert device.adopt_stream(0) != device.create_stream("other")
    assert device.stream_name(device.adopt_stream(0)) == "compute"


def test_elapsed_time_is_measured_between_timed_events_only(device: _C.Device) -> None:
    stream = device.create_stream("s")
    memory, host = device.allocate_device(SIZE), device.allocate_pinned(SIZE)
    begin = device.record(stream, timing=True)
    device.copy_async(host, memory, SIZE, TO_HOST, stream)
    end = device.record(stream, timing=True)
    assert device.elapsed_ns(begin, end) >= 0
    with pytest.raises(errors.InvalidArgumentError, match="recorded with timing.*no timing"):
        device.elapsed_ns(begin, device.record(stream))
    with pytest.raises(errors.InvalidArgumentError, match="recorded with timing.*an empty event"):
        device.elapsed_ns(_C.Event(), end)


def test_a_copy_of_nothing_is_nothing(device: _C.Device) -> None:
    stream = device.create_stream("s")
    device.copy_async(0, 0, 0, TO_HOST, stream)
    device.drain(stream)


def test_adopted_streams_take_copies_too(device: _C.Device) -> None:
    compute = device.adopt_stream(0)
    memory, host = device.allocate_device(SIZE), device.allocate_pinned(SIZE)
    fill_host(host, pattern(SIZE))
    device.copy_async(memory, host, SIZE, TO_DEVICE, compute)
    assert download(device, compute, memory, SIZE) == pattern(SIZE)


@pytest.mark.parametrize("what", ["target", "source"])
def test_null_addresses_are_refused(device: _C.Device, what: str) -> None:
    stream = device.create_stream("s")
    memory, host = device.allocate_device(64), device.allocate_pinned(64)
    target, source = (0, memory) if what == "target" else (host, 0)
    with pytest.raises(errors.InvalidArgumentError, match=f"{what}: expected an address, got null"):
        device.copy_async(target, source, 64, TO_HOST, stream)


@pytest.mark.parametrize("size", [1 << 48, (1 << 64) - 1])
def test_absurd_sizes_are_refused(device: _C.Device, size: int) -> None:
    stream = device.create_stream("s")
    memory, host = device.allocate_device(64), device.allocate_pinned(64)
    with pytest.raises(errors.InvalidArgumentError, match=f"at most 128 TiB.*got {size}"):
        device.copy_async(host, memory, size, TO_HOST, stream)
    for allocate in (device.allocate_pinned, device.allocate_device):
        with pytest.raises(errors.InvalidArgumentError, match=f"between 1 byte and 128 TiB, got {size}"):
            allocate(size)
        with pytest.raises(errors.InvalidArgumentError, match="between 1 byte and 128 TiB, got 0"):
            allocate(0)


def test_negative_sizes_are_no_sizes(device: _C.Device) -> None:
    stream = device.create_stream("s")
    for call in (
        lambda: device.allocate_pinned(-1),
        lambda: device.allocate_device(-1),
        lambda: device.copy_async(1, 1, -1, TO_HOST, stream),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call()


def test_host_memory_that_is_not_pinned_is_refused(device: _C.Device) -> None:
    """On a GPU such a copy would work, but it would silently be synchronous."""
    stream = device.create_stream("s")
    memory, host = device.allocate_device(8192), device.allocate_pinned(4096)
    expected = "inside one allocation pinned by this device"
    for address, size in [(memory, 64), (host + 4096, 1), (host, 4097), (host - 1, 2)]:
        with pytest.raises(errors.InvalidArgumentError, match=expected):
            device.copy_async(address, memory, size, TO_HOST, stream)
        with pytest.raises(errors.InvalidArgumentError, match=expected):
            device.copy_async(memory, address, size, TO_DEVICE, stream)


def test_freeing_twice_is_refused(device: _C.Device) -> None:
    host, memory = device.allocate_pinned(64), device.allocate_device(64)
    device.free_pinned(host)
    device.free_device(memory)
    with pytest.raises(errors.InvalidArgumentError, match="pinned memory that this device allocated"):
        device.free_pinned(host)
    with pytest.raises(errors.InvalidArgumentError, match="device memory that this device allocated"):
        device.free_device(memory)


def test_streams_and_events_of_another_device_are_refused(device: _C.Device) -> None:
    other = _C.SimDevice(name="another device")
    foreign = other.create_stream("foreign")
    event = other.record(foreign)
    stream = device.create_stream("s")
    for call in (
        lambda: device.record(foreign),
        lambda: device.wait(foreign, _C.Event()),
        lambda: device.drain(foreign),
        lambda: device.copy_async(1, 1, 1, TO_HOST, foreign),
        lambda: device.stream_name(foreign),
        lambda: device.note_access(1, 1, _C.Access.READ, foreign),
    ):
        with pytest.raises(errors.DeviceMismatchError, match="stream does not belong to device"):
            call()
    for call in (
        lambda: device.wait(stream, event),
        lambda: device.query(event),
        lambda: device.synchronize(event),
    ):
        with pytest.raises(errors.DeviceMismatchError, match="event does not belong to device"):
            call()
    other.close()


def test_a_closed_device_says_so_at_every_call(device: _C.Device) -> None:
    stream = device.create_stream("s")
    event = device.record(stream)
    host = device.allocate_pinned(64)
    device.close()
    device.close()
    assert device.closed
    assert "closed" in repr(device)
    for call in (
        lambda: device.create_stream("again"),
        lambda: device.adopt_stream(0),
        lambda: device.stream_name(stream),
        lambda: device.record(stream),
        lambda: device.wait(stream, event),
        lambda: device.query(event),
        lambda: device.synchronize(event),
        lambda: device.drain(stream),
        lambda: device.copy_async(host, host, 1, TO_HOST, stream),
        lambda: device.allocate_pinned(64),
        lambda: device.free_pinned(host),
        lambda: device.allocate_device(64),
        lambda: device.note_access(host, 1, _C.Access.RELEASE, stream),
    ):
        with pytest.raises(errors.ClosedError, match="close\\(\\) was called"):
            call()


def test_events_may_outlive_their_device(device: _C.Device) -> None:
    stream = device.create_stream("s")
    events = [device.record(stream) for _ in range(8)]
    device.close()
    del events[::2]
    gc.collect()
    assert events[0].stream == stream


def test_close_finishes_what_was_put_on_its_streams(device: _C.Device) -> None:
    if device.info.name != "Fake GPU" and device.info.kind == "cuda":
        pytest.skip("a real GPU's memory cannot be looked at after close()")
    stream = device.create_stream("s")
    host = device.allocate_pinned(SIZE)
    target = bytearray(SIZE)  # stands for device memory, and outlives the device
    address = _address_of(target)
    fill_host(host, pattern(SIZE))
    device.copy_async(address, host, SIZE, TO_DEVICE, stream)
    device.close()
    assert bytes(target) == pattern(SIZE)


def _address_of(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
