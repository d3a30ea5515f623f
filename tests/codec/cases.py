"""The codec's case table, and the expected result of each kernel in Python and numpy.

The formulas here share nothing with the C++ reference: tests compare the reference with them, and every device with the
reference, over the same table. Sizes are on both sides of a byte of bits, a word, a warp and a wide access; offsets
cover every misalignment of either side within 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vdnn import _C

Kernel = _C.Kernel

_COUNTS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1000, 4099, 1000003]
_COUNTS_AT_EACH_OFFSET = [33, 1000]
HASH_BYTES = 8
KERNELS = [Kernel.PACK_BITS, Kernel.UNPACK_BITS, Kernel.CONTENT_HASH]


@dataclass(frozen=True)
class Case:
    """One call: a kernel, a count, and the offsets of source and target from an address divisible by 16."""

    kernel: Kernel
    count: int
    source_offset: int = 0
    target_offset: int = 0

    def source(self) -> bytes:
        """The same bytes in every run. A third of them are 0, so that a mask has elements of both kinds."""
        random = np.random.default_rng(seed=self.count)
        source = random.integers(0, 256, source_bytes(self.kernel, self.count), dtype=np.uint8)
        source[random.random(source.size) < 1 / 3] = 0
        return source.tobytes()

    def call(self, *, source: int, target: int) -> _C.KernelCall:
        return _C.KernelCall(self.kernel, source, target, self.count)


def kernel_name(kernel: Kernel) -> str:
    return str(kernel.name).lower()


def source_bytes(kernel: Kernel, count: int) -> int:
    return -(-count // 8) if kernel == Kernel.UNPACK_BITS else count


def cases_of(kernel: Kernel) -> Iterator[Case]:
    # The target of a hash is always aligned to 8 bytes.
    step = HASH_BYTES if kernel == Kernel.CONTENT_HASH else 1
    for count in _COUNTS:
        yield Case(kernel, count)
    for count in _COUNTS_AT_EACH_OFFSET:
        for offset in range(16):
            yield Case(kernel, count, source_offset=offset)
            yield Case(kernel, count, target_offset=offset // step * step)
            # 7 and 16 are coprime, so every offset of one side is paired with every other of the other side.
            yield Case(kernel, count, source_offset=offset, target_offset=offset * 7 % 16 // step * step)


def expected_target(kernel: Kernel, count: int, source: bytes) -> bytes:
    """The bytes that the kernel leaves at its target, computed by numpy and plain Python."""
    values = np.frombuffer(source, np.uint8)
    if kernel == Kernel.PACK_BITS:
        return np.packbits(values != 0, bitorder="little").tobytes()
    if kernel == Kernel.UNPACK_BITS:
        return np.unpackbits(values, bitorder="little", count=count).tobytes()
    return slow_content_hash(source).to_bytes(HASH_BYTES, "little")


def slow_content_hash(content: bytes) -> int:
    """The content hash as defined in csrc/codec/content_hash.h, in integers that cannot overflow."""
    total = _hash_term(len(content), 2**63)
    for index in range(-(-len(content) // 8)):
        total += _hash_term(int.from_bytes(content[8 * index : 8 * index + 8], "little"), index)
    return total % 2**64


def _hash_term(word: int, index: int) -> int:
    word ^= (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31
