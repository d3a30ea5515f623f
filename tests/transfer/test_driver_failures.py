"""Makes every driver call of a full offload and reload round fail in turn.

Each time there is a clear error with call, code name and size. After a refusal, the next round works on the same
device. After an asynchronous error, every later call reports it at once. When everything is closed, the driver counts
no live objects.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import open_fake_device
from tests.device.device_memory import TO_DEVICE, fill_host, pattern
from tests.fake_driver.control import FakeDriver
from tests.transfer.transfer_rig import KIB
from vdnn import _C, errors

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
SIZES = [3 * KIB, 300 * KIB, 5 * KIB, 100 * KIB]  # two of them small enough for a batch
SIZED_CALLS = {
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemAlloc_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuLaunchKernel",
}


class Round:
    """Opens a device, moves storages out and back, hashes one, and closes. `self` holds the parts for clean-up."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.closers: list[Callable[[], None]] = []
        self.usable = False

    def open(self) -> None:
        self.device = open_fake_device(self.driver)
        self.closers.append(self.device.close)
        self.compute = self.device.adopt_stream(0)
        self.pool = _C.PinnedPool(self.device, cap_bytes=1 << 20)
        self.closers.append(self.pool.close)
        self.queue = _C.TransferQueue(self.device, self.pool)
        self.closers.append(self.queue.close)
        self.usable = True

    def move(self) -> None:
        """Runs a full round. The memory that stands for torch's is always released."""
        device = self.device
        taken: list[int] = []
        pinned: list[int] = []
        try:
            staging = device.allocate_pinned(max(SIZES))
            pinned.append(staging)
            copies, contents = [], []
            for seed, size in enumerate(SIZES):
                taken.append(device.allocate_device(size))
                contents.append(pattern(size, seed))
                fill_host(staging, contents[-1])
                device.copy_async(taken[-1], staging, size, TO_DEVICE, self.compute)
                copies.append(self.queue.offload(taken[-1], size, self.compute))
            self.hash(taken[0])
            for copy in copies:
                assert copy is not None
                assert self.queue.release(copy)
            for copy, content in zip(reversed(copies), reversed(contents), strict=True):
                assert copy is not None
                taken.append(device.allocate_device(copy.bytes))
                reload = self.queue.reload(copy, taken[-1], self.compute)
                self.queue.wait(reload, self.compute)
                device.copy_async(staging, taken[-1], copy.bytes, _C.CopyDirection.DEVICE_TO_HOST, self.compute)
                device.drain(self.compute)
                assert _read(staging, copy.bytes) == content
        finally:
            # The handles are dropped first, as when a graph is freed: the queue must not copy from released memory.
            copies = copy = None  # type: ignore[assignment]
            _again_if_refused(self.queue.collect)
            self.give_back(taken, pinned)

    def hash(self, address: int) -> None:
        if not _C.device_code_present():
            return
        target = self.device.allocate_device(8)
        try:
            self.device.launch(_C.KernelCall(_C.Kernel.CONTENT_HASH, address, target, SIZES[0]), self.compute)
            begin = self.device.record(self.compute, timing=True)
            end = self.device.record(self.compute, timing=True)
            assert self.device.elapsed_ns(begin, end) >= 0
            assert self.device.query(end)
        finally:
            _again_if_refused(lambda: self.device.free_device(target))

    def give_back(self, taken: list[int], pinned: list[int]) -> None:
        self.queue.take_released()
        for address in taken:
            _again_if_refused(lambda address=address: self.device.free_device(address))
        for address in pinned:
            _again_if_refused(lambda address=address: self.device.free_pinned(address))

    def close(self) -> None:
        """Closes inner parts first. Each is closed again if the driver refused."""
        self.usable = False
        for closer in reversed(self.closers):
            closer()
        self.closers.clear()

    def close_whatever_happens(self) -> None:
        for closer in reversed(self.closers):
            for _ in range(3):
                try:
                    closer()
                    break
                except errors.VdnnError:
                    continue
        self.closers.clear()

    def __call__(self) -> None:
        self.open()
        self.move()
        self.close()


def _read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def _again_if_refused(give_back: Callable[[], None]) -> None:
    """Tries a refused call once more and re-raises the first error, which is the one that matters."""
    try:
        give_back()
    except errors.DriverError:
        give_back()
        raise
    except errors.DeviceLostError:
        pass  # close() releases it


def leaks_of(driver: FakeDriver) -> dict[str, int]:
    """Returns the live objects. Garbage (an error and its frames) is collected only if there are any, because that is
    slow."""
    if driver.leaks():
        gc.collect()
    return driver.leaks()


def calls_of_a_round(driver: FakeDriver) -> list[str]:
    driver.reset()
    Round(driver)()
    return driver.calls()


def test_every_refusal_is_told_clearly_and_the_next_round_works(fake_driver: FakeDriver) -> None:
    names = calls_of_a_round(fake_driver)
    told: dict[str, errors.DriverError] = {}
    for nth in range(1, len(names) + 1):
        fake_driver.reset()
        fake_driver.fail_nth(nth, OUT_OF_MEMORY)
        faulty = Round(fake_driver)
        with pytest.raises(errors.DriverError) as caught:
            faulty()
        error = caught.value
        assert fake_driver.faults_pending == 0
        assert error.call == names[nth - 1], f"call {nth} was {names[nth - 1]}, the error says {error.call}"
        assert error.code_name == "CUDA_ERROR_OUT_OF_MEMORY"
        assert (error.bytes > 0) == (error.call in SIZED_CALLS), error
        told[error.call] = error
        if faulty.usable:
            faulty.move()  # the device still works
        faulty.close_whatever_happens()
        del faulty, caught, error
        assert leaks_of(fake_driver) == {}, f"after call {nth}, {names[nth - 1]}"
    # The loop made every entry point of a round fail. The doctor uses the remaining ones.
    header = Path(__file__).resolve().parents[2] / "csrc" / "device" / "cuda" / "driver_api.h"
    listed = set(re.findall(r"X\((cu\w+)", header.read_text()))
    doctor_only = {"cuDriverGetVersion", "cuGetErrorName"}
    assert set(told) == listed - doctor_only - (set() if _C.device_code_present() else DEVICE_CODE_CALLS)


DEVICE_CODE_CALLS = {
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuMemsetD8Async",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventSynchronize",
}


def test_every_asynchronous_error_is_told_at_once_and_for_ever(fake_driver: FakeDriver) -> None:
    names = calls_of_a_round(fake_driver)
    asynchronous = sum(name.startswith(("cuMemcpy", "cuMemset", "cuLaunch")) for name in names)
    assert asynchronous >= 4 * len(SIZES)
    for nth in range(1, asynchronous + 1):
        fake_driver.reset()
        faulty = Round(fake_driver)
        faulty.open()
        fake_driver.fail_async(nth, ILLEGAL_ADDRESS)
        with pytest.raises(errors.DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            faulty.move()
        before = fake_driver.call_count
        for call in (
            faulty.move,
            lambda faulty=faulty: faulty.device.record(faulty.compute),
            lambda faulty=faulty: faulty.device.create_stream("more"),
        ):
            with pytest.raises(errors.DeviceLostError, match="first reported by cu"):
                call()
        assert fake_driver.call_count == before, "a lost device is not asked again"
        faulty.close_whatever_happens()
        del faulty
        assert leaks_of(fake_driver) == {}, f"after asynchronous operation {nth}"


def test_a_copy_whose_end_cannot_be_recorded_is_waited_for(fake_driver: FakeDriver) -> None:
    """The copy runs, but recording its event is refused: neither its source nor its block may be reused early."""
    fake_driver.reset()
    good = Round(fake_driver)
    good.open()
    address = good.device.allocate_device(300 * KIB)
    fake_driver.hold_streams()
    fake_driver.fail_call("cuEventRecord", 2, OUT_OF_MEMORY)
    with pytest.raises(errors.DriverError, match="cuEventRecord"):
        good.queue.offload(address, 300 * KIB, good.compute)
    assert "cuStreamSynchronize" in fake_driver.calls()
    good.move()
    good.close()


def test_a_failed_batch_keeps_each_source_with_its_copy(fake_driver: FakeDriver) -> None:
    fake_driver.reset()
    rig = Round(fake_driver)
    rig.open()
    address = rig.device.allocate_device(4 * KIB)
    first = rig.queue.offload(address, KIB, rig.compute, keepalive="first source")
    second = rig.queue.offload(address + KIB, KIB, rig.compute, keepalive="second source")
    assert first is not None
    assert second is not None
    fake_driver.fail_call("cuMemcpyDtoHAsync_v2", 2, OUT_OF_MEMORY)
    with pytest.raises(errors.DriverError, match=r"cuMemcpyDtoHAsync_v2 of 1\.00 KiB"):
        rig.queue.flush()
    assert rig.queue.state(first) == _C.CopyState.SUBMITTED, "it was taken, and has been waited for"
    assert rig.queue.state(second) == _C.CopyState.FAILED
    reason, source = rig.queue.failure(second)
    assert source == "second source"
    assert "cuMemcpyDtoHAsync_v2" in reason
    assert not rig.queue.release(second)
    with pytest.raises(errors.InvalidArgumentError, match="a copy that reached the host, got one that failed"):
        rig.queue.reload(second, address, rig.compute)
    assert rig.queue.release(first)
    rig.close()


def test_a_device_that_could_not_wait_for_its_copies_is_not_closed(fake_driver: FakeDriver) -> None:
    """Otherwise its queue would treat running copies as complete and drop their sources."""
    fake_driver.reset()
    rig = Round(fake_driver)
    rig.open()
    address = rig.device.allocate_device(300 * KIB)
    fake_driver.hold_streams()
    copy = rig.queue.offload(address, 300 * KIB, rig.compute, keepalive="source")
    fake_driver.fail_call("cuStreamSynchronize", 1, OUT_OF_MEMORY)
    with pytest.raises(errors.DriverError, match="cuStreamSynchronize"):
        rig.device.close()
    assert not rig.device.closed
    waits = fake_driver.calls().count("cuStreamSynchronize")
    rig.queue.close()
    assert fake_driver.calls().count("cuStreamSynchronize") == waits + 2, "it waits for both its streams"
    assert rig.queue.take_released() == ["source"]
    del copy
    rig.close()
    assert leaks_of(fake_driver) == {}


def test_a_device_that_could_not_give_all_back_is_closed_and_closing_again_does(fake_driver: FakeDriver) -> None:
    """Nothing runs any more, which is all that its queue and its pool need to know."""
    fake_driver.reset()
    rig = Round(fake_driver)
    rig.open()
    address = rig.device.allocate_device(300 * KIB)
    copy = rig.queue.offload(address, 300 * KIB, rig.compute, keepalive="source")
    fake_driver.fail_call("cuStreamDestroy", 1, OUT_OF_MEMORY)
    with pytest.raises(errors.DriverError, match="cuStreamDestroy"):
        rig.device.close()
    assert rig.device.closed
    rig.queue.close()
    assert rig.queue.take_released() == ["source"]
    rig.pool.close()
    del copy
    rig.device.close()
    assert leaks_of(fake_driver) == {}
