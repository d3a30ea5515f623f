"""The driver calls of CudaDevice, observed on the fake driver, which runs the real code without a GPU."""

from __future__ import annotations

import sys
import textwrap
import threading

import pytest

from tests.conftest import open_fake_device, require_cuda
from tests.device.device_memory import TO_HOST, download, pattern, upload
from tests.fake_driver.control import FakeDriver
from tests.patience import run_to_its_end
from vdnn import _C, errors

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700


def test_copy_streams_do_not_synchronise_with_the_default_stream(fake_driver: FakeDriver) -> None:
    """torch computes on the legacy default stream. An ordinary stream would wait for it, and it for that stream."""
    device = open_fake_device(fake_driver)
    device.create_stream("a")
    device.create_stream("b")
    assert fake_driver.blocking_streams == 0
    device.close()


def test_the_context_of_the_calling_thread_is_left_as_it_was(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    stream = device.create_stream("a")
    device.drain(stream)
    calls = fake_driver.calls()
    assert calls.count("cuCtxPushCurrent_v2") == calls.count("cuCtxPopCurrent_v2") > 0
    device.close()


def test_events_are_reused_once_nobody_holds_them(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    stream = device.create_stream("a")
    for _ in range(100):
        device.record(stream)
    assert fake_driver.live("event") == 1
    held = [device.record(stream) for _ in range(10)]
    assert fake_driver.live("event") == 10
    held.clear()
    device.record(stream, timing=True)  # timed events have their own pool
    assert fake_driver.live("event") == 11
    device.close()


def test_calls_that_a_graph_capture_forbids_are_made_in_relaxed_mode(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    fake_driver.reset()
    device.free_pinned(device.allocate_pinned(64))
    calls = fake_driver.calls()
    for call in ("cuMemHostRegister_v2", "cuMemHostUnregister"):
        before = calls[: calls.index(call)].count("cuThreadExchangeStreamCaptureMode")
        assert before % 2 == 1, calls
    assert calls.count("cuThreadExchangeStreamCaptureMode") == 4
    device.close()


def test_device_code_is_loaded_once_and_only_when_asked_for(fake_driver: FakeDriver) -> None:
    if not _C.device_code_present():
        pytest.skip(_C.device_code_missing_reason())
    device = open_fake_device(fake_driver)
    stream = device.create_stream("a")
    memory = device.allocate_device(64)
    assert fake_driver.live("module") == 0
    for _ in range(3):
        device.launch(_C.KernelCall(_C.Kernel.PACK_BITS, memory, memory + 32, 16), stream)
    assert fake_driver.calls().count("cuModuleLoadData") == 1
    assert fake_driver.calls().count("cuModuleGetFunction") == 1
    device.close()


def test_a_device_dropped_without_close_is_closed_soon_after(fake_driver: FakeDriver) -> None:
    held = [open_fake_device(fake_driver)]
    held[0].create_stream("a")
    held[0].allocate_pinned(4096)
    assert fake_driver.calls_in(held.clear) == 0, "a destructor must not call the driver"
    assert fake_driver.leaks() == {}


def test_a_thread_frees_what_was_dropped_while_the_main_thread_is_busy(fake_driver: FakeDriver) -> None:
    held = [open_fake_device(fake_driver)]
    held[0].allocate_pinned(4096)
    leaks: list[dict[str, int]] = []

    def drop() -> None:
        held.clear()
        _C.free_parked()
        leaks.append(fake_driver.leaks())

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert leaks == [{}]


def test_many_threads_may_use_one_device(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = device.create_stream(f"thread {seed}")
            memory = device.allocate_device(4096)
            for turn in range(20):
                upload(device, stream, memory, pattern(4096, seed + turn))
                assert download(device, stream, memory, 4096) == pattern(4096, seed + turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    device.close()


@pytest.mark.parametrize("name", ["record", "query", "adopt_stream", "stream_name"])
def test_calls_of_the_driver_and_waits_for_its_lock_let_other_threads_run(fake_driver: FakeDriver, name: str) -> None:
    """No thread takes the interpreter from the one that calls the device, so another runs only if the call lets it."""
    device = open_fake_device(fake_driver)
    stream = device.create_stream("a")
    arguments = {"query": (device.record(stream),), "adopt_stream": ()}.get(name, (stream,))
    call = getattr(device, name)
    gate, has_run = threading.Lock(), threading.Event()
    gate.acquire()
    other = threading.Thread(target=lambda: (gate.acquire(), has_run.set()))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        gate.release()
        lets_run = any(call(*arguments) is not None and has_run.is_set() for _ in range(100_000))
    finally:
        sys.setswitchinterval(interval)
        other.join()
        device.close()
    assert lets_run


def test_a_refused_call_names_call_code_and_size_and_the_device_works_on(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    fake_driver.fail_call("cuMemHostRegister_v2", 1, OUT_OF_MEMORY)
    with pytest.raises(errors.DriverError) as caught:
        device.allocate_pinned(10_000)
    assert caught.value.call == "cuMemHostRegister_v2"
    assert caught.value.code_name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert caught.value.bytes == 12_288  # in whole pages
    assert "12.00 KiB" in str(caught.value)
    assert "The device still works" in str(caught.value)
    device.free_pinned(device.allocate_pinned(10_000))
    device.close()


def test_after_an_asynchronous_error_every_call_says_so(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    stream = device.create_stream("a")
    memory, host = device.allocate_device(64), device.allocate_pinned(64)
    event = device.record(stream)
    fake_driver.fail_async(1, ILLEGAL_ADDRESS)
    device.copy_async(host, memory, 64, TO_HOST, stream)
    with pytest.raises(errors.DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.drain(stream)
    calls = fake_driver.call_count
    for call in (
        lambda: device.record(stream),
        lambda: device.query(event),
        lambda: device.copy_async(host, memory, 64, TO_HOST, stream),
        lambda: device.allocate_pinned(64),
        lambda: device.free_pinned(host),
        lambda: device.create_stream("b"),
        lambda: device.free_device(memory),
    ):
        with pytest.raises(errors.DeviceLostError, match=r"an earlier call.*first reported by cu"):
            call()
    assert fake_driver.call_count == calls, "a lost device is not asked again"
    device.close()
    assert fake_driver.leaks() == {}


def test_an_asynchronous_error_that_only_close_finds_is_raised_after_giving_back(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    stream = device.create_stream("a")
    memory, host = device.allocate_device(64), device.allocate_pinned(64)
    fake_driver.hold_streams()
    fake_driver.fail_async(1, ILLEGAL_ADDRESS)
    device.copy_async(host, memory, 64, TO_HOST, stream)
    with pytest.raises(errors.DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.close()
    assert fake_driver.leaks() == {}
    device.close()


def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(errors.DriverUnavailableError, match="no-such-library") as caught:
        _C.CudaDevice(library="no-such-library.so")
    assert caught.value.library == "no-such-library.so"
    status = _C.driver_status("no-such-library.so")
    assert not status["loaded"]
    assert "no-such-library.so" in status["reason"]


def test_a_library_that_is_no_driver_is_told_what_it_lacks() -> None:
    with pytest.raises(errors.DriverUnavailableError, match="lacks the entry point cuInit"):
        _C.CudaDevice(library=_C.__file__)


def test_a_driver_without_devices_is_told_so(fake_driver: FakeDriver) -> None:
    fake_driver.set_device_count(0)
    with pytest.raises((errors.DriverUnavailableError, errors.DriverError), match="NO_DEVICE|sees no device"):
        open_fake_device(fake_driver)
    assert _C.driver_status(str(fake_driver.path))["device_count"] == 0


@pytest.mark.parametrize("ordinal", [-1, 1, 99])
def test_a_device_number_that_is_not_there_is_refused(fake_driver: FakeDriver, ordinal: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"a device number from 0 to 0, got {ordinal}"):
        _C.CudaDevice(ordinal, str(fake_driver.path))


EXIT_PROGRAM = """
    import sys
    from tests.fake_driver.control import FakeDriver
    from vdnn import _C

    driver = FakeDriver()
    device = _C.CudaDevice(library=str(driver.path))
    pool = _C.PinnedPool(device, cap_bytes=1 << 20)
    queue = _C.TransferQueue(device, pool)
    driver.hold_streams()
    copy = queue.offload(device.allocate_device(200_000), 200_000, device.adopt_stream(0), keepalive=object())
    sys.kept = (device, pool, queue, copy)  # alive when the interpreter ends

    import atexit, _thread
    atexit._run_exitfuncs()
    assert driver.leaks() == {}, driver.leaks()
    calls = driver.call_count
    del device, pool, queue, copy, sys.kept
    assert driver.call_count == calls
    print("left in peace")
"""


def test_the_end_of_the_interpreter_closes_devices_before_destructors_run(fake_driver: FakeDriver) -> None:
    result = run_to_its_end([sys.executable, "-c", textwrap.dedent(EXIT_PROGRAM)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "left in peace"


@pytest.mark.gpu
def test_a_gpu_is_described() -> None:
    require_cuda()
    device = _C.CudaDevice()
    assert device.info.kind == "cuda"
    assert device.info.total_bytes > 1 << 30
    assert device.info.compute_capability >= 50
    device.close()
