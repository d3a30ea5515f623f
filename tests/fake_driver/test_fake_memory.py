"""Memory of the fake driver: legal copies, the work that a free waits for, and the results of kernels."""

from __future__ import annotations

import ctypes

from tests.fake_driver.control import FakeDriver
from tests.fake_driver.raw_driver import KernelCall, RawDriver

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_HANDLE = 400
NOT_FOUND = 500
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_copies_go_both_ways(cuda: RawDriver) -> None:
    stream, device = cuda.stream(), cuda.device_bytes(b"....")
    source, target = cuda.host_bytes(b"data"), cuda.host_bytes(b"....")
    cuda.ok("cuMemcpyHtoDAsync_v2", device, source, 4, stream)
    cuda.ok("cuMemcpyDtoHAsync_v2", target, device, 4, stream)
    cuda.ok("cuStreamSynchronize", stream)
    assert (read(device, 4), read(target, 4)) == (b"data", b"data")


def test_host_side_of_a_copy_must_lie_in_one_registered_range(cuda: RawDriver) -> None:
    stream, device, host = cuda.stream(), cuda.device_bytes(bytes(8)), cuda.host_bytes(bytes(8), pinned=False)

    def copy(offset: int, size: int) -> int:
        return cuda.call("cuMemcpyDtoHAsync_v2", host + offset, device, size, stream)

    assert copy(0, 8) == INVALID_VALUE
    cuda.ok("cuMemHostRegister_v2", host, 4, 1)
    cuda.ok("cuMemHostRegister_v2", host + 4, 4, 1)
    assert [copy(0, 4), copy(4, 4), copy(1, 2), copy(0, 0)] == [0, 0, 0, 0]
    assert [copy(0, 8), copy(2, 4), copy(6, 4)] == [INVALID_VALUE, INVALID_VALUE, INVALID_VALUE]
    cuda.ok("cuMemHostUnregister", host)
    cuda.ok("cuMemHostUnregister", host + 4)
    assert copy(0, 4) == INVALID_VALUE


def test_device_side_of_a_copy_is_held_to_its_allocation(cuda: RawDriver) -> None:
    stream, host = cuda.stream(), cuda.host_bytes(bytes(8))
    device, tensor = cuda.device_bytes(bytes(4)), cuda.host_bytes(bytes(8), pinned=False)
    assert cuda.call("cuMemcpyHtoDAsync_v2", device, host, 8, stream) == INVALID_VALUE
    assert cuda.call("cuMemcpyHtoDAsync_v2", 0, host, 8, stream) == INVALID_VALUE
    assert cuda.call("cuMemsetD8Async", device, 1, 5, stream) == INVALID_VALUE
    cuda.ok("cuMemcpyHtoDAsync_v2", tensor, host, 8, stream)
    cuda.ok("cuStreamSynchronize", stream)


def test_registering_overlapping_ranges_is_refused(cuda: RawDriver) -> None:
    host = cuda.host_bytes(bytes(16), pinned=False)
    cuda.ok("cuMemHostRegister_v2", host + 4, 8, 1)
    for offset, size in ((4, 8), (0, 5), (11, 4), (0, 16), (6, 2)):
        assert cuda.call("cuMemHostRegister_v2", host + offset, size, 1) == ALREADY_REGISTERED
    assert cuda.call("cuMemHostUnregister", host) == NOT_REGISTERED
    cuda.ok("cuMemHostUnregister", host + 4)
    assert cuda.call("cuMemHostUnregister", host + 4) == NOT_REGISTERED


def test_null_and_empty_ranges_are_refused(cuda: RawDriver) -> None:
    host = cuda.host_bytes(b"....", pinned=False)
    assert cuda.call("cuMemHostRegister_v2", None, 4, 1) == INVALID_VALUE
    assert cuda.call("cuMemHostRegister_v2", host, 0, 1) == INVALID_VALUE
    assert cuda.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 0) == INVALID_VALUE
    assert cuda.call("cuMemFree_v2", 0x1000) == INVALID_VALUE
    assert cuda.call("cuMemHostUnregister", None) == INVALID_VALUE


def test_capacities_are_kept(fake: FakeDriver, cuda: RawDriver) -> None:
    fake.set_device_capacity(1000)
    fake.set_host_capacity(10)
    address = cuda.get("cuMemAlloc_v2", 600)
    assert cuda.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 401) == OUT_OF_MEMORY
    host = cuda.host_bytes(bytes(32), pinned=False)
    assert cuda.call("cuMemHostRegister_v2", host, 11, 1) == OUT_OF_MEMORY
    cuda.ok("cuMemHostRegister_v2", host, 10, 1)
    assert fake.leaks() == {"context": 1, "device_bytes": 600, "host_bytes": 10, "pinned_ranges": 1}
    cuda.ok("cuMemFree_v2", address)
    cuda.ok("cuMemHostUnregister", host)
    assert fake.leaks() == {"context": 1}


def test_freeing_device_memory_waits_for_every_stream(fake: FakeDriver, cuda: RawDriver) -> None:
    device, unrelated = cuda.device_bytes(b"...."), cuda.device_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemsetD8Async", device, ord("a"), 4, cuda.stream())
    cuda.ok("cuMemFree_v2", unrelated)
    assert read(device, 4) == b"aaaa"


def test_unregistering_waits_for_every_stream(fake: FakeDriver, cuda: RawDriver) -> None:
    device, host = cuda.device_bytes(b"data"), cuda.host_bytes(b"....")
    fake.hold_streams()
    cuda.ok("cuMemcpyDtoHAsync_v2", host, device, 4, cuda.stream())
    assert read(host, 4) == b"...."
    cuda.ok("cuMemHostUnregister", host)
    assert read(host, 4) == b"data"


def test_launch_copies_its_argument_and_runs_the_reference(fake: FakeDriver, cuda: RawDriver) -> None:
    stream, function = cuda.stream(), cuda.function("vdnn_pack_bits")
    source, target = cuda.device_bytes(bytes([1, 0, 0, 1, 1, 0, 0, 0, 1])), cuda.device_bytes(b"\xff\xff")
    call = KernelCall(kernel=0, source=source, target=target, count=9)
    fake.hold_streams()
    assert cuda.launch(function, call, stream) == 0
    call.count = 0
    cuda.ok("cuStreamSynchronize", stream)
    assert read(target, 2) == bytes([0b11001, 1])
    assert fake.issues() == ["launch s1 vdnn_pack_bits"]


def test_content_hash_is_added_to_its_target(cuda: RawDriver) -> None:
    function, source = cuda.function("vdnn_content_hash"), cuda.device_bytes(b"some bytes")
    target = cuda.device_bytes(bytes(8))
    call = KernelCall(kernel=2, source=source, target=target, count=10)
    assert cuda.launch(function, call, None) == 0
    once = int.from_bytes(read(target, 8), "little")
    assert cuda.launch(function, call, None) == 0
    assert int.from_bytes(read(target, 8), "little") == 2 * once % 2**64
    cuda.ok("cuMemsetD8Async", target, 0, 8, None)
    assert cuda.launch(function, call, None) == 0
    assert int.from_bytes(read(target, 8), "little") == once != 0


def test_unknown_functions_and_modules_are_refused(cuda: RawDriver) -> None:
    module = cuda.get("cuModuleLoadData", b"any image")
    out = ctypes.c_void_p()
    assert cuda.call("cuModuleLoadData", ctypes.byref(out), None) == INVALID_VALUE
    assert cuda.call("cuModuleGetFunction", ctypes.byref(out), module, b"vdnn_unheard_of") == NOT_FOUND
    function = cuda.get("cuModuleGetFunction", module, b"vdnn_pack_bits")
    cuda.ok("cuModuleUnload", module)
    assert cuda.call("cuModuleUnload", module) == INVALID_HANDLE
    assert cuda.launch(function, KernelCall(), None) == INVALID_HANDLE
