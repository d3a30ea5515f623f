"""The inputs that the content hash tells apart, and the facts that it must not depend on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.codec.cases import slow_content_hash
from tests.codec.host_memory import content_hash

CONTENT = np.random.default_rng(seed=7).integers(0, 256, 131, dtype=np.uint8).tobytes()


def _all_differ(contents: list[bytes]) -> bool:
    return len({content_hash(content) for content in contents}) == len(contents)


def _with_flipped_bits(content: bytes, *bits: int) -> bytes:
    number = int.from_bytes(content, "little")
    for bit in bits:
        number ^= 1 << bit
    return number.to_bytes(len(content), "little")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", 0x481EC0A212A9F3DB), (b"vdnn", 0xD662B7207BB0A60C), (bytes(range(256)), 0x7761FB69D9662C97)],
    ids=["nothing", "a_part_of_a_word", "whole_words"],
)
def test_known_contents_keep_their_hashes(content: bytes, expected: int) -> None:
    assert content_hash(content) == expected
    assert slow_content_hash(content) == expected


def test_each_flipped_bit_gives_another_hash() -> None:
    flipped = [_with_flipped_bits(CONTENT[:41], bit) for bit in range(41 * 8)]
    assert _all_differ([CONTENT[:41], *flipped])


def test_one_bit_flipped_in_two_words_gives_another_hash() -> None:
    # Sign bits of two floating point numbers matter most: a sum of badly mixed words would cancel them.
    words = range(8)
    contents = [
        _with_flipped_bits(CONTENT[:64], first * 64 + bit, second * 64 + bit)
        for bit in range(64)
        for first, second in itertools.combinations(words, 2)
    ]
    assert _all_differ([CONTENT[:64], *contents])


def test_two_swapped_words_give_another_hash() -> None:
    words = [CONTENT[i : i + 8] for i in range(0, 128, 8)]
    contents = [b"".join(words)]
    for first, second in itertools.combinations(range(len(words)), 2):
        swapped = words.copy()
        swapped[first], swapped[second] = swapped[second], swapped[first]
        contents.append(b"".join(swapped))
    assert _all_differ(contents)


def test_zeros_at_either_end_give_another_hash() -> None:
    assert _all_differ([CONTENT + bytes(zeros) for zeros in range(65)])
    assert _all_differ([bytes(zeros) + CONTENT for zeros in range(65)])


def test_zero_blocks_of_every_length_differ() -> None:
    assert _all_differ([bytes(zeros) for zeros in range(300)])


def test_shifted_content_of_the_same_length_differs() -> None:
    assert _all_differ([CONTENT[shift:] + CONTENT[:shift] for shift in range(len(CONTENT))])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 31, 32, 33, 131])
def test_the_hash_does_not_depend_on_the_alignment(length: int) -> None:
    hashes = {content_hash(CONTENT[:length], offset=offset) for offset in range(16)}
    assert hashes == {slow_content_hash(CONTENT[:length])}


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_different_contents_have_different_hashes(first: bytes, second: bytes) -> None:
    assume(first != second)
    assert content_hash(first) != content_hash(second)
