"""The model of torch's caching allocator: its rules, on cases that are computed by hand, and what an H200 reserved."""

from __future__ import annotations

import random

import pytest

from vdnn.runtime.machine.caching_allocator import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20
BOTH = pytest.mark.parametrize("expandable", [False, True])


def reserved(*sizes: int, expandable: bool = False) -> tuple[int, int]:
    allocator = CachingAllocator(expandable=expandable)
    for key, nbytes in enumerate(sizes):
        allocator.allocate(key, nbytes)
    return allocator.allocated_bytes, allocator.reserved_bytes


@BOTH
def test_requests_are_rounded_up_to_512_bytes(expandable: bool) -> None:
    assert reserved(1, 512, 513, expandable=expandable)[0] == 512 + 512 + 1024
    assert reserved(0, expandable=expandable) == (0, 0)


def test_small_requests_share_segments_of_2_mib() -> None:
    assert reserved(1) == (512, 2 * MIB)
    assert reserved(MIB, MIB) == (2 * MIB, 2 * MIB)
    assert reserved(MIB, MIB, 1)[1] == 4 * MIB


def test_large_requests_share_segments_of_20_mib() -> None:
    assert reserved(MIB + 1) == (MIB + 512, 20 * MIB)
    assert reserved(6 * MIB, 6 * MIB, 6 * MIB)[1] == 20 * MIB
    assert reserved(6 * MIB, 6 * MIB, 6 * MIB, 6 * MIB)[1] == 40 * MIB


def test_requests_of_10_mib_have_a_segment_of_their_own() -> None:
    assert reserved(10 * MIB) == (10 * MIB, 10 * MIB)
    assert reserved(10 * MIB + 1) == (10 * MIB + 512, 12 * MIB)


def test_a_large_block_is_split_only_above_1_mib() -> None:
    # Of 12 MiB, 1 MiB less 512 bytes are left: they stay part of the block, which counts as allocated.
    assert reserved(11 * MIB + 512) == (12 * MIB, 12 * MIB)
    # Of 20 MiB, 11 MiB are left, which the second request gets.
    assert reserved(9 * MIB, 9 * MIB) == (18 * MIB, 20 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    for key, nbytes in (("wide", 40 * MIB), ("narrow", 30 * MIB)):
        allocator.allocate(key, nbytes)
    allocator.free("wide")
    allocator.free("narrow")
    allocator.allocate("again", 29 * MIB)  # 1 MiB is left of the narrow one, and not split off
    assert allocator.allocated_bytes == 30 * MIB
    allocator.allocate("other", 40 * MIB)
    assert allocator.reserved_bytes == 70 * MIB


def test_free_neighbours_are_merged_and_segments_are_not() -> None:
    allocator = CachingAllocator()
    for key in "abc":
        allocator.allocate(key, 6 * MIB)
    allocator.free("a")
    allocator.free("b")
    allocator.allocate("wide", 9 * MIB + 512)
    assert allocator.reserved_bytes == 20 * MIB
    two = CachingAllocator()
    for key in "ab":
        two.allocate(key, 10 * MIB)
    for key in "ab":
        two.free(key)
    two.allocate("wide", 20 * MIB)
    assert (two.allocated_bytes, two.reserved_bytes) == (20 * MIB, 40 * MIB)


@BOTH
def test_a_block_serves_its_stream_alone(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate("one", 20 * MIB, stream=1)
    allocator.free("one")
    allocator.allocate("two", 20 * MIB, stream=2)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate("three", 20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_an_expandable_segment_grows_at_its_end() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.allocate("one", 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate("two", 30 * MIB)  # 10 MiB are there
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free("one")
    allocator.free("two")
    allocator.allocate("wide", 60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    assert reserved(1, expandable=True) == (512, 2 * MIB)


def test_an_empty_cache_returns_whole_segments() -> None:
    allocator = CachingAllocator()
    for key in "ab":
        allocator.allocate(key, 6 * MIB)
    allocator.allocate("c", 30 * MIB)
    allocator.free("a")
    allocator.free("c")
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB  # "b" holds its segment


def test_an_empty_cache_returns_whole_granules_of_an_expandable_segment() -> None:
    allocator = CachingAllocator(expandable=True)
    for key, nbytes in (("a", 30 * MIB), ("b", 30 * MIB)):
        allocator.allocate(key, nbytes)
    allocator.free("a")
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB  # of 30 MiB, one granule of 20
    allocator.allocate("c", 5 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate("d", 25 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (60 * MIB, 60 * MIB)


def test_cached_segments_are_returned_under_pressure_and_a_failure_is_counted() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.allocate("one", 60 * MIB)
    allocator.free("one")
    allocator.allocate("two", 80 * MIB)
    assert (allocator.reserved_bytes, allocator.failures) == (80 * MIB, 0)
    allocator.allocate("three", 40 * MIB)
    assert allocator.failures == 1


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_no_byte_is_lost_whatever_the_order(expandable: bool, seed: int) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator(expandable=expandable, limit_bytes=4096 * MIB)
    held: dict[int, int] = {}
    for key in range(2000):
        if held and draw.random() < 0.5:
            allocator.free(victim := draw.choice(list(held)))
            del held[victim]
        else:
            held[key] = draw.choice((100, 70 * KIB, 3 * MIB, 17 * MIB, 40 * MIB))
            allocator.allocate(key, held[key], stream=draw.randrange(2))
        if draw.random() < 0.01:
            allocator.empty_cache()
        assert sum(held.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
    for key in held:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
