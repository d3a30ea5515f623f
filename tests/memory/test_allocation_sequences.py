"""Pinned memory of whole training steps, beside the requested memory and that of a power-of-two cache.

The sequences are those of benchmarks/core/allocation_sequences.py. The peak of requested bytes is computed here from
the sequence itself. The ratios do not depend on the machine, because the pool only does arithmetic.
"""

from __future__ import annotations

import pytest

from benchmarks.core.allocation_sequences import (
    VARYING_TOKENS,
    Allocation,
    Free,
    Sequenced,
    repeated,
    requested_peak_bytes,
    transformer_sequence,
    vgg16_sequence,
)
from benchmarks.core.pool_replay import replay
from benchmarks.core.power_of_two_cache import pinned_by_cache_bytes

STEPS = 3
FIXED = {
    "vgg16, batch 1": vgg16_sequence(1, STEPS),
    "vgg16, batch 64": vgg16_sequence(64, STEPS),
    "vgg16, batch 250": vgg16_sequence(250, STEPS),
    "transformer, 8 x 1024": transformer_sequence(8, [1024] * STEPS),
    "transformer, 3 x 731": transformer_sequence(3, [731] * STEPS),
}
# Lengths that change from step to step. A later step cannot use a slightly smaller block of an earlier one, and a slab
# with one block on it cannot be released. So these bounds are the ratios that are reached, not a target.
VARYING = {
    "transformer, mixed lengths": (transformer_sequence(8, VARYING_TOKENS), 1.05),
    "transformer, mixed lengths, 3 rounds": (transformer_sequence(8, VARYING_TOKENS * 3), 1.05),
    "transformer, growing lengths": (transformer_sequence(8, range(128, 1025, 64)), 1.20),
}


def peak_by_hand(sequence: Sequenced) -> int:
    live: dict[int, int] = {}
    peak = 0
    for item in sequence:
        if isinstance(item, Allocation):
            live[item.block] = item.bytes
        else:
            del live[item.block]
        peak = max(peak, sum(live.values()))
    assert not live
    return peak


def pinned_ratio(name: str, sequence: Sequenced, capsys: pytest.CaptureFixture[str]) -> float:
    """Returns pinned over requested bytes, and prints it beside the cache's ratio."""
    requested = peak_by_hand(sequence)
    stats = replay(sequence)
    assert stats.live_peak_bytes == requested
    assert stats.live_bytes == 0
    ratio, cache = stats.pinned_peak_bytes / requested, pinned_by_cache_bytes(sequence) / requested
    with capsys.disabled():
        print(f"\n  {name:38} {requested / 2**30:7.3f} GiB: pool {ratio:.3f} x, powers of two {cache:.3f} x")
    return ratio


@pytest.mark.parametrize("name", FIXED)
def test_steps_of_one_shape_pin_at_most_a_twentieth_more(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pinned_ratio(name, FIXED[name], capsys) <= 1.05


@pytest.mark.parametrize("name", VARYING)
def test_steps_of_many_shapes_pin_what_they_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sequence, bound = VARYING[name]
    ratio = pinned_ratio(name, sequence, capsys)
    assert ratio <= bound
    assert ratio < pinned_by_cache_bytes(sequence) / peak_by_hand(sequence)


def test_later_steps_pin_nothing_more() -> None:
    assert replay(vgg16_sequence(64, 9)).growths_awaited == replay(vgg16_sequence(64, 1)).growths_awaited


def test_the_first_blocks_of_vgg16_are_its_first_maps() -> None:
    """Two maps of 64 channels of 224 x 224 float32; then the pooled map, a quarter of one, and its int64 indices."""
    first = [item for item in vgg16_sequence(256)[:4] if isinstance(item, Allocation)]
    map_bytes = 256 * 64 * 224 * 224 * 4
    assert [item.bytes for item in first] == [map_bytes, map_bytes, map_bytes // 4, map_bytes // 2]


def test_a_step_gives_everything_back_in_reverse() -> None:
    assert repeated([[5, 7]] * 2) == [
        *(Allocation(0, 5), Allocation(1, 7), Free(1), Free(0)),
        *(Allocation(2, 5), Allocation(3, 7), Free(3), Free(2)),
    ]
    assert requested_peak_bytes(repeated([[5, 7], [3, 2]])) == 12


def test_the_cache_rounds_up_and_takes_back_only_its_own_size() -> None:
    assert pinned_by_cache_bytes(repeated([[1024]])) == 1024
    assert pinned_by_cache_bytes(repeated([[1025]])) == 2048
    assert pinned_by_cache_bytes(repeated([[1025], [2000]])) == 2048  # equal rounded sizes: the block is reused
    assert pinned_by_cache_bytes(repeated([[1025], [1000]])) == 2048 + 1024  # the smaller size cannot reuse it
