"""Host memory for one side of a kernel call: at a chosen offset, between guard bytes that must not change."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.codec.cases import HASH_BYTES, Case, Kernel
from vdnn import _C

GUARD = 0xA5
GUARD_BYTES = 64


class GuardedMemory:
    """`size` bytes that start `offset` bytes after an address divisible by 16, with guards on both sides."""

    def __init__(self, size: int, *, offset: int = 0) -> None:
        # The array owns the memory behind the addresses, so it has to live as long as this object.
        self._array: Any = np.full(GUARD_BYTES + 16 + size + GUARD_BYTES, GUARD, np.uint8)
        padding = -(self._array.ctypes.data + GUARD_BYTES) % 16
        self._begin = GUARD_BYTES + padding + offset
        self._end = self._begin + size
        self.address: int = self._array.ctypes.data + self._begin

    @classmethod
    def holding(cls, content: bytes, *, offset: int = 0) -> GuardedMemory:
        memory = cls(len(content), offset=offset)
        memory._array[memory._begin : memory._end] = np.frombuffer(content, np.uint8)
        return memory

    def content(self) -> bytes:
        """Returns the bytes between the guards, and checks that the guards are unchanged."""
        outside = np.concatenate([self._array[: self._begin], self._array[self._end :]])
        assert (outside == GUARD).all(), f"guard bytes around {self._end - self._begin} bytes were written"
        return self._array[self._begin : self._end].tobytes()


def target_bytes(kernel: Kernel, count: int) -> int:
    if kernel == Kernel.CONTENT_HASH:
        return HASH_BYTES
    return -(-count // 8) if kernel == Kernel.PACK_BITS else count


def reference_target(case: Case, content: bytes) -> bytes:
    """Returns the result of run_on_cpu for `content`. Checks that the source and the guards are unchanged."""
    source = GuardedMemory.holding(content, offset=case.source_offset)
    target = GuardedMemory(target_bytes(case.kernel, case.count), offset=case.target_offset)
    _C.run_on_cpu(case.call(source=source.address, target=target.address))
    assert source.content() == content, f"{case}: the source was written"
    return target.content()


def content_hash(content: bytes, *, offset: int = 0) -> int:
    case = Case(Kernel.CONTENT_HASH, len(content), source_offset=offset)
    return int.from_bytes(reference_target(case, content), "little")
