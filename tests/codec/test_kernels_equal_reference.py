"""Every device's kernels against the CPU reference, bit for bit, over the whole case table.

Upload, launch, download, compare: the target with guard bytes on both sides, so a kernel that writes one byte
too many fails too. Everything is on one stream, and the host waits only before it touches the staging memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.codec.cases import KERNELS, Case, Kernel, cases_of, kernel_name, source_bytes
from tests.codec.host_memory import GUARD, GUARD_BYTES, reference_target, target_bytes
from vdnn import _C

TO_DEVICE = _C.CopyDirection.HOST_TO_DEVICE
TO_HOST = _C.CopyDirection.DEVICE_TO_HOST
PADDING_BYTES = 16


@pytest.fixture(autouse=True)
def _device_code(device: Any) -> None:
    """Kernels of a CUDA device, and of the fake driver, come from the embedded device code."""
    if device.info.kind == "cuda" and not _C.device_code_present():
        pytest.skip(_C.device_code_missing_reason())


def _round_up(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment


class Bench:
    """Device memory for a source and a guarded target, and the pinned memory that fills and reads it."""

    def __init__(self, device: Any, stream: Any, blocks: tuple[int, int, int]) -> None:
        self._device = device
        self._stream = stream
        source, target, self._staging = blocks
        self._source = _round_up(source, PADDING_BYTES)
        self._target = _round_up(target, PADDING_BYTES)

    def upload(self, address: int, content: bytes) -> None:
        if not content:
            return
        ctypes.memmove(self._staging, content, len(content))
        self._device.copy_async(address, self._staging, len(content), TO_DEVICE, self._stream)
        self._device.drain(self._stream)  # the next call writes to the staging memory

    def download(self, address: int, size: int) -> bytes:
        self._device.copy_async(self._staging, address, size, TO_HOST, self._stream)
        self._device.drain(self._stream)
        return ctypes.string_at(self._staging, size)

    def run(self, case: Case, content: bytes) -> tuple[bytes, bytes, bytes]:
        """Returns the target as the device left it, and the guards before and after it."""
        source = self._source + case.source_offset
        target = self._target + GUARD_BYTES + case.target_offset
        size = target_bytes(case.kernel, case.count)
        self.upload(source, content)
        self.upload(target - GUARD_BYTES, bytes([GUARD]) * (size + 2 * GUARD_BYTES))
        self._device.launch(case.call(source=source, target=target), self._stream)
        image = self.download(target - GUARD_BYTES, size + 2 * GUARD_BYTES)
        return image[GUARD_BYTES:-GUARD_BYTES], image[:GUARD_BYTES], image[-GUARD_BYTES:]


@contextmanager
def _bench(device: Any, cases: list[Case]) -> Iterator[Bench]:
    most_source = max(source_bytes(case.kernel, case.count) for case in cases) + 2 * PADDING_BYTES
    most_target = max(target_bytes(case.kernel, case.count) for case in cases)
    most_target += 2 * (PADDING_BYTES + GUARD_BYTES)
    stream = device.create_stream("codec test")
    source = device.allocate_device(most_source)
    target = device.allocate_device(most_target)
    staging = device.allocate_pinned(max(most_source, most_target))
    try:
        yield Bench(device, stream, (source, target, staging))
    finally:
        device.drain(stream)
        device.free_device(source)
        device.free_device(target)
        device.free_pinned(staging)


@pytest.mark.parametrize("kernel", KERNELS, ids=kernel_name)
def test_a_launched_kernel_gives_the_bytes_of_the_reference(device: Any, kernel: Kernel) -> None:
    cases = list(cases_of(kernel))
    guards = bytes([GUARD]) * GUARD_BYTES
    with _bench(device, cases) as bench:
        for case in cases:
            content = case.source()
            target, before, after = bench.run(case, content)
            assert target == reference_target(case, content), case
            assert before == guards, f"{case}: bytes before the target were written"
            assert after == guards, f"{case}: bytes after the target were written"


def test_a_hash_launched_twice_on_one_target_is_the_same_hash(device: Any) -> None:
    # The blocks of a GPU add to the target, so without clearing it first the second launch would double the hash.
    case = Case(Kernel.CONTENT_HASH, 100_000)
    content = case.source()
    with _bench(device, [case]) as bench:
        first = bench.run(case, content)
        assert bench.run(case, content) == first


def test_kernels_of_one_stream_run_in_the_order_of_their_launches(device: Any) -> None:
    count = 4099
    mask = Case(Kernel.PACK_BITS, count).source()
    packed_bytes = -(-count // 8)
    expected = bytes(int(element != 0) for element in mask)
    stream = device.create_stream("codec test")
    blocks = [device.allocate_device(size) for size in (count, packed_bytes, count)]
    staging = device.allocate_pinned(count)
    bench = Bench(device, stream, (blocks[0], blocks[2], staging))
    try:
        bench.upload(blocks[0], mask)
        device.launch(_C.KernelCall(Kernel.PACK_BITS, blocks[0], blocks[1], count), stream)
        device.launch(_C.KernelCall(Kernel.UNPACK_BITS, blocks[1], blocks[2], count), stream)
        assert bench.download(blocks[2], count) == expected
    finally:
        device.drain(stream)
        for block in blocks:
            device.free_device(block)
        device.free_pinned(staging)
