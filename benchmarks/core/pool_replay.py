"""Compares the bytes that the PinnedPool pins for a sequence with those requested and those that a cache would pin.

Runs the real pool on a device that only keeps addresses. Blocks are returned without a last reader to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.core.allocation_sequences import (
    VARYING_TOKENS,
    Allocation,
    Sequenced,
    requested_peak_bytes,
    transformer_sequence,
    vgg16_sequence,
)
from benchmarks.core.power_of_two_cache import pinned_by_cache_bytes
from vdnn import _C


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """The peaks over a sequence."""

    sequence: str
    requested_peak_bytes: int
    pinned_peak_bytes: int
    cache_pinned_bytes: int


def replay(sequence: Sequenced) -> _C.PoolStats:
    """Drive a new pool through the sequence. Returns the pool's statistics."""
    device = _C.SimDevice(moves_bytes=False)
    pool = _C.PinnedPool(device, cap_bytes=2**40)
    blocks: dict[int, _C.PinnedBlock] = {}
    try:
        for item in sequence:
            if isinstance(item, Allocation):
                blocks[item.block] = pool.allocate(item.bytes)
            else:
                del blocks[item.block]
        return pool.stats
    finally:
        blocks.clear()
        pool.close()
        device.close()


def measure_pool() -> list[PoolFigures]:
    sequences = {
        "VGG-16, batch 64, 3 steps": vgg16_sequence(64, 3),
        "GPT-2 medium, 8 x 1024, 3 steps": transformer_sequence(8, [1024] * 3),
        "GPT-2 medium, 8 x 256..1024, 7 steps": transformer_sequence(8, VARYING_TOKENS),
        "GPT-2 medium, 8 x 128..1024, growing": transformer_sequence(8, range(128, 1025, 64)),
    }
    return [figures(name, sequence) for name, sequence in sequences.items()]


def figures(name: str, sequence: Sequenced) -> PoolFigures:
    return PoolFigures(
        sequence=name,
        requested_peak_bytes=requested_peak_bytes(sequence),
        pinned_peak_bytes=replay(sequence).pinned_peak_bytes,
        cache_pinned_bytes=pinned_by_cache_bytes(sequence),
    )
