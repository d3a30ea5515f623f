"""Armed faults fire exactly where they were armed, and calls and operations are counted."""

from __future__ import annotations

import ctypes

import pytest

from tests.fake_driver.control import FakeDriver
from tests.fake_driver.raw_driver import RawDriver

OUT_OF_MEMORY = 2
INVALID_HANDLE = 400
LAUNCH_FAILED = 719


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_nth_call_fails_and_does_nothing(fake: FakeDriver, cuda: RawDriver, nth: int) -> None:
    device = cuda.device_bytes(b"....")
    fake.fail_nth(nth, OUT_OF_MEMORY)
    codes = [cuda.call("cuMemsetD8Async", device, value, 4, None) for value in range(1, 5)]
    assert codes == [OUT_OF_MEMORY if number == nth else 0 for number in range(1, 5)]
    assert read(device, 4) == bytes([3 if nth == 4 else 4]) * 4
    assert len(fake.issues()) == 3
    assert fake.faults_pending == 0


def test_error_name_is_never_the_call_that_fails(fake: FakeDriver, cuda: RawDriver) -> None:
    fake.fail_nth(1, OUT_OF_MEMORY)
    before = fake.call_count
    assert cuda.error_name(2) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert fake.call_count == before
    assert cuda.call("cuInit", 0) == OUT_OF_MEMORY


def test_refused_destroy_leaves_the_object_alive(fake: FakeDriver, cuda: RawDriver) -> None:
    stream = cuda.stream()
    fake.fail_call("cuStreamDestroy", 1, 999)
    assert cuda.call("cuStreamDestroy_v2", stream) == 999
    assert fake.live("stream") == 1
    cuda.ok("cuStreamDestroy_v2", stream)
    assert fake.live("stream") == 0


def test_fault_of_one_entry_point_counts_only_its_calls(fake: FakeDriver, cuda: RawDriver) -> None:
    fake.fail_call("cuEventCreate", 2, OUT_OF_MEMORY)
    cuda.event()
    cuda.stream()
    assert cuda.call("cuEventCreate", ctypes.byref(ctypes.c_void_p()), 2) == OUT_OF_MEMORY
    cuda.event()


def test_fault_of_an_unknown_entry_point_is_an_error(fake: FakeDriver) -> None:
    with pytest.raises(ValueError, match="cuMemcpyPeer"):
        fake.fail_call("cuMemcpyPeer", 1, 1)
    with pytest.raises(ValueError, match="counts from 1"):
        fake.fail_nth(0, 1)


def test_asynchronous_error_is_told_by_every_later_call(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, device = cuda.stream(), cuda.device_bytes(b"....")
    fake.hold_streams()
    fake.fail_async(2, LAUNCH_FAILED)
    for value in b"abc":
        cuda.ok("cuMemsetD8Async", device, value, 4, stream)
    event = cuda.recorded(stream)
    assert cuda.call("cuStreamSynchronize", stream) == LAUNCH_FAILED
    assert read(device, 4) == b"aaaa"
    assert cuda.call("cuEventQuery", event) == LAUNCH_FAILED
    assert cuda.call("cuEventCreate", ctypes.byref(ctypes.c_void_p()), 2) == LAUNCH_FAILED
    cuda.ok("cuInit", 0)
    assert cuda.get("cuDeviceGetCount") == 1
    cuda.ok("cuCtxPopCurrent_v2", None)
    cuda.ok("cuCtxPushCurrent_v2", 0x50000000)


def test_lost_context_still_takes_things_back(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, event, device, host = (
        cuda.stream(),
        cuda.event(),
        cuda.device_bytes(b"...."),
        cuda.host_bytes(b"...."),
    )
    fake.fail_async(1, LAUNCH_FAILED)
    cuda.ok("cuMemsetD8Async", device, 1, 4, None)
    gives_back = {
        "cuStreamDestroy_v2": stream,
        "cuEventDestroy_v2": event,
        "cuMemFree_v2": device,
        "cuMemHostUnregister": host,
    }
    assert [cuda.call(name, handle) for name, handle in gives_back.items()] == [LAUNCH_FAILED] * 4
    assert fake.leaks() == {"context": 1}
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 0)
    assert fake.leaks() == {}
    fake.reset()
    cuda.get("cuDevicePrimaryCtxRetain", 0)


def test_reset_forgets_faults_counters_and_names(fake: FakeDriver, cuda: RawDriver) -> None:
    cuda.ok("cuStreamDestroy_v2", cuda.stream(flags=0))
    fake.fail_nth(1, OUT_OF_MEMORY)
    fake.fail_async(1, LAUNCH_FAILED)
    assert fake.faults_pending == 2
    fake.reset()
    assert (fake.faults_pending, fake.call_count, fake.blocking_streams, fake.issues()) == (0, 0, 0, [])
    cuda.recorded(cuda.stream())
    assert fake.issues() == ["record s1 e1v1"]


def test_calls_and_issues_are_logged_in_order(fake: FakeDriver, cuda: RawDriver) -> None:
    first, second = cuda.stream(), cuda.stream()
    device, host = cuda.device_bytes(bytes(8)), cuda.host_bytes(bytes(8))
    event = cuda.event()
    fake.reset()
    cuda.ok("cuMemcpyDtoHAsync_v2", host, device, 8, first)
    cuda.ok("cuEventRecord", event, first)
    cuda.ok("cuStreamWaitEvent", second, event, 0)
    cuda.ok("cuMemcpyHtoDAsync_v2", device, host, 4, second)
    cuda.ok("cuEventRecord", event, None)
    assert cuda.call("cuEventRecord", event, 0x77) == INVALID_HANDLE
    assert fake.calls() == [
        "cuMemcpyDtoHAsync_v2",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuEventRecord",
    ]
    assert fake.issues() == [
        "copy_d2h s1 8",
        "record s1 e1v1",
        "wait s2 e1v1",
        "copy_h2d s2 4",
        "record s0 e1v2",
    ]


def test_nothing_is_counted_under_an_unknown_kind(fake: FakeDriver) -> None:
    with pytest.raises(ValueError, match="expected one of context, stream"):
        fake.live("graph")
