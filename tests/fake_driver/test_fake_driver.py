"""The fake driver behaves as CUDA documents, call by call, without vdnn in between.

Tests hold streams to make order visible: an operation that nothing has waited for has not run, so no test sleeps.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fake_driver.control import FakeDriver
from tests.fake_driver.raw_driver import RawDriver, declared_calls
from tests.patience import run_to_its_end

NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
CONTEXT_IS_DESTROYED = 709


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


# The library.


def test_exports_exactly_the_entry_points_of_the_header(fake: FakeDriver) -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(fake.path)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert {name for name in exported if name.startswith("cu")} == set(declared_calls())


def test_process_exits_with_streams_alive_and_work_held(fake: FakeDriver) -> None:
    program = f"""
from pathlib import Path
from tests.fake_driver.control import FakeDriver
from tests.fake_driver.raw_driver import RawDriver
fake = FakeDriver(Path({str(fake.path)!r}))
cuda = RawDriver(fake.path)
cuda.open()
fake.hold_streams()
for _ in range(4):
    cuda.recorded(cuda.stream())
import _ctypes
_ctypes.dlclose(cuda._library._handle)
_ctypes.dlclose(fake._library._handle)
"""
    root = Path(__file__).resolve().parents[2]
    run_to_its_end([sys.executable, "-c", program], cwd=root, check=True)


def test_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make build"):
        FakeDriver(tmp_path / "none.so")


# Initialization, devices and contexts.


def test_calls_before_init_are_refused(fake: FakeDriver, tmp_path: Path) -> None:
    copy = tmp_path / "fresh.so"
    shutil.copy(fake.path, copy)
    cuda = RawDriver(copy)
    count = ctypes.c_int(0)
    assert cuda.call("cuDeviceGetCount", ctypes.byref(count)) == NOT_INITIALIZED
    assert cuda.get("cuDriverGetVersion") >= 12000
    cuda.ok("cuInit", 0)
    assert cuda.get("cuDeviceGetCount") == 1


def test_no_device_is_told_by_init(fake: FakeDriver, cuda: RawDriver) -> None:
    fake.set_device_count(0)
    assert cuda.call("cuInit", 0) == NO_DEVICE
    assert cuda.get("cuDeviceGetCount") == 0
    assert cuda.call("cuDeviceGet", ctypes.byref(ctypes.c_int()), 0) == INVALID_DEVICE


def test_device_describes_itself(cuda: RawDriver) -> None:
    text = ctypes.create_string_buffer(32)
    cuda.ok("cuDeviceGetName", text, 32, 0)
    assert text.value == b"Fake GPU"
    cuda.ok("cuDeviceGetPCIBusId", text, 32, 0)
    assert text.value == b"0000:00:00.0"
    assert cuda.get("cuDeviceTotalMem_v2", 0) == 64 << 30
    assert [cuda.get("cuDeviceGetAttribute", attribute, 0) for attribute in (75, 76, 18)] == [9, 0, 0]


def test_context_is_current_per_thread(cuda: RawDriver) -> None:
    codes: list[int] = []
    event = ctypes.c_void_p()
    thread = threading.Thread(target=lambda: codes.append(cuda.call("cuEventCreate", ctypes.byref(event), 2)))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]


def test_context_released_for_the_last_time_is_destroyed(fake: FakeDriver, cuda: RawDriver) -> None:
    assert fake.leaks() == {"context": 1}
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 0)
    assert cuda.call("cuStreamSynchronize", None) == CONTEXT_IS_DESTROYED
    assert cuda.call("cuDevicePrimaryCtxRelease_v2", 0) == INVALID_CONTEXT
    cuda.get("cuDevicePrimaryCtxRetain", 0)
    cuda.ok("cuStreamSynchronize", None)


def test_capture_mode_is_exchanged_per_thread(cuda: RawDriver) -> None:
    mode = ctypes.c_int(2)
    cuda.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0
    cuda.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 2


def test_error_names_are_the_drivers(cuda: RawDriver) -> None:
    assert cuda.error_name(2) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert cuda.error_name(719) == "CUDA_ERROR_LAUNCH_FAILED"
    assert cuda.error_name(12345) is None


# Streams.


def test_stream_runs_its_work_in_order(fake: FakeDriver, cuda: RawDriver) -> None:
    fake.set_delays(seed=7, max_microseconds=50)
    stream, device, last = cuda.stream(), cuda.device_bytes(b"...."), bytes([19]) * 4
    for value in range(20):
        cuda.ok("cuMemsetD8Async", device, value, 4, stream)
    cuda.ok("cuStreamSynchronize", stream)
    assert read(device, 4) == last


def test_held_stream_runs_only_what_is_waited_for(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, device = cuda.stream(), cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, stream)
    first = cuda.recorded(stream)
    cuda.ok("cuMemsetD8Async", device, ord("b"), 4, stream)
    assert cuda.call("cuEventQuery", first) == NOT_READY
    assert read(device, 4) == b"...."
    cuda.ok("cuEventSynchronize", first)
    assert read(device, 4) == b"aaaa"
    cuda.ok("cuStreamSynchronize", stream)
    assert read(device, 4) == b"bbbb"


def test_held_stream_runs_when_let_go(fake: FakeDriver, cuda: RawDriver) -> None:
    stream = cuda.stream()
    fake.hold_streams()
    event = cuda.recorded(stream)
    fake.hold_streams(held=False)
    while (code := cuda.call("cuEventQuery", event)) == NOT_READY:
        pass
    assert code == 0


def test_waiting_for_a_held_stream_releases_what_it_waits_for(fake: FakeDriver, cuda: RawDriver) -> None:
    first, second = cuda.stream(), cuda.stream()
    device = cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, first)
    cuda.ok("cuStreamWaitEvent", second, cuda.recorded(first), 0)
    cuda.ok("cuStreamSynchronize", second)
    assert read(device, 4) == b"aaaa"


def test_legacy_stream_runs_inline_and_waits_for_events(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, device, other = cuda.stream(), cuda.device_bytes(b"...."), cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, stream)
    event = cuda.recorded(stream)
    cuda.ok("cuMemsetD8Async", other, ord("b"), 4, None)
    assert (read(device, 4), read(other, 4)) == (b"....", b"bbbb")
    cuda.ok("cuStreamWaitEvent", None, event, 0)
    assert read(device, 4) == b"aaaa"


def test_legacy_stream_waits_for_blocking_streams_only(fake: FakeDriver, cuda: RawDriver) -> None:
    blocking, free = cuda.stream(flags=0), cuda.stream(flags=1)
    device, other = cuda.device_bytes(b"...."), cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, blocking)
    cuda.ok("cuMemsetD8Async", other, ord("b"), 4, free)
    cuda.recorded(None)
    assert (read(device, 4), read(other, 4)) == (b"aaaa", b"....")
    assert fake.blocking_streams == 1


def test_blocking_stream_runs_after_the_legacy_stream(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, device, host = cuda.stream(flags=0), cuda.device_bytes(b"...."), cuda.host_bytes(b"....")
    context = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(context))

    def fill() -> None:
        cuda.ok("cuCtxPushCurrent_v2", context)
        cuda.ok("cuMemsetD8Async", device, ord("x"), 4, None)

    # The legacy stream draws its pause when the memset is logged, so delays can then be off for the other stream.
    fake.set_delays(seed=1, max_microseconds=100_000)
    thread = threading.Thread(target=fill)
    thread.start()
    while not fake.issues():
        pass
    fake.set_delays(seed=0, max_microseconds=0)
    cuda.ok("cuMemcpyDtoHAsync_v2", host, device, 4, stream)
    cuda.ok("cuStreamSynchronize", stream)
    thread.join()
    assert read(host, 4) == b"xxxx"


def test_stream_handle_that_was_not_created_is_refused(cuda: RawDriver) -> None:
    stream = cuda.stream()
    cuda.ok("cuStreamDestroy_v2", stream)
    for handle in (stream, 0x1234, 1):
        assert cuda.call("cuStreamSynchronize", handle) == INVALID_HANDLE
    assert cuda.call("cuStreamDestroy_v2", None) == INVALID_HANDLE


def test_work_of_a_destroyed_stream_still_runs(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, device = cuda.stream(), cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, stream)
    event = cuda.recorded(stream)
    cuda.ok("cuStreamDestroy_v2", stream)
    assert fake.live("stream") == 0
    while (code := cuda.call("cuEventQuery", event)) == NOT_READY:
        pass
    assert (code, read(device, 4)) == (0, b"aaaa")


# Events.


def test_wait_refers_to_the_record_that_was_there(fake: FakeDriver, cuda: RawDriver) -> None:
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    device = cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuEventRecord", event, first)
    cuda.ok("cuStreamWaitEvent", second, event, 0)
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, first)
    cuda.ok("cuEventRecord", event, first)
    cuda.ok("cuStreamSynchronize", second)
    assert read(device, 4) == b"...."
    assert cuda.call("cuEventQuery", event) == NOT_READY
    assert fake.issues() == ["record s1 e1v1", "wait s2 e1v1", "memset s1 4", "record s1 e1v2"]


def test_event_recorded_again_behind_its_own_wait_does_not_deadlock(cuda: RawDriver) -> None:
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    cuda.ok("cuEventRecord", event, first)
    cuda.ok("cuStreamWaitEvent", second, event, 0)
    cuda.ok("cuEventRecord", event, second)
    cuda.ok("cuEventSynchronize", event)


def test_event_never_recorded_counts_as_complete(cuda: RawDriver) -> None:
    event = cuda.event()
    cuda.ok("cuEventQuery", event)
    cuda.ok("cuEventSynchronize", event)
    cuda.ok("cuStreamWaitEvent", cuda.stream(), event, 0)


def test_event_may_be_destroyed_while_it_is_pending(fake: FakeDriver, cuda: RawDriver) -> None:
    first, second, device = cuda.stream(), cuda.stream(), cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, first)
    event = cuda.recorded(first)
    cuda.ok("cuStreamWaitEvent", second, event, 0)
    cuda.ok("cuEventDestroy_v2", event)
    assert cuda.call("cuEventQuery", event) == INVALID_HANDLE
    cuda.ok("cuStreamSynchronize", second)
    assert read(device, 4) == b"aaaa"


def test_elapsed_time_needs_two_timed_events_that_have_happened(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, begin, end, untimed = cuda.stream(), cuda.event(flags=0), cuda.event(flags=0), cuda.event(flags=2)
    elapsed = ctypes.c_float(-1.0)
    fake.hold_streams()
    cuda.ok("cuEventRecord", begin, stream)
    assert cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), begin, end) == INVALID_HANDLE
    cuda.ok("cuEventRecord", end, stream)
    cuda.ok("cuEventRecord", untimed, stream)
    assert cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), begin, end) == NOT_READY
    cuda.ok("cuStreamSynchronize", stream)
    assert cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), begin, untimed) == INVALID_HANDLE
    cuda.ok("cuEventElapsedTime", ctypes.byref(elapsed), begin, end)
    assert elapsed.value >= 0.0
