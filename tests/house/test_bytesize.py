"""vdnn.bytesize parses sizes as people write them, exactly, and says why it refuses others."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vdnn.bytesize import MAX_BYTES, UNITS, exact_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * 1024**3),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("512 MiB", 512 * 1024**2),
        ("  2 TiB  ", 2 * 1024**4),
        ("64KiB", 65536),
        ("8GB", 8 * 10**9),
        ("8.25 MB", 8_250_000),
        ("3kB", 3000),
        ("3KB", 3000),
        (".5kB", 500),
        ("100B", 100),
        ("4096", 4096),
        ("+1MiB", 1024**2),
        (4096, 4096),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_a_size_is_read_exactly(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_a_fraction_of_a_byte_is_rounded_down() -> None:
    # 0.3 * 2**30 = 322122547.2
    assert parse_bytes("0.3GiB") == 322_122_547


def test_large_sizes_do_not_pass_through_floating_point() -> None:
    # 2**53 + 1 is the first integer that a float cannot hold.
    assert parse_bytes("9007199254740993") == 2**53 + 1
    assert parse_bytes("8388607.999999999999 TiB") == int(Fraction("8388607.999999999999") * 2**40)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("", "expected a size such as"),
        ("GiB", "got 'GiB'"),
        ("twelve GiB", "got 'twelve GiB'"),
        ("nan GiB", "got 'nan GiB'"),
        ("inf", "got 'inf'"),
        ("1e9", "'e' is not a unit|got '1e9'"),
        ("1 2 GiB", "got '1 2 GiB'"),
        ("1,5GiB", "got '1,5GiB'"),
        ("-1GiB", "expected a size above zero, got '-1GiB'"),
        ("0", "at least 1 byte, got '0'"),
        ("0.4B", "at least 1 byte, got '0.4B'"),
        ("1.5", "a fraction needs a unit"),
        ("12G", r"'G' is not a unit; write GiB \(powers of 1024\) or GB"),
        ("12gib", "write GiB"),
        ("12Gb", "write GiB"),
        ("12 apples", "the units are B, kB"),
        ("9999999TiB", r"at most 8388608\.00 TiB"),
        (0, "at least 1 byte, got 0"),
        (-5, "at least 1 byte, got -5"),
        (2**63, "at most"),
    ],
)
def test_nonsense_is_refused_with_what_came(size: str | int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_bytes(size)


@pytest.mark.parametrize("size", [True, 1.5, float("nan"), None, b"12GiB", Decimal(12)])
def test_another_type_is_refused_with_what_came(size: object) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(size))):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (65536, "64.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (2**40, "1.00 TiB"),
        (-3 * 2**20, "-3.00 MiB"),
    ],
)
def test_a_count_is_shown_in_the_unit_that_fits(count: int, text: str) -> None:
    assert format_bytes(count) == text


# Below MAX_BYTES, because the text may be rounded up past it.
@given(st.integers(min_value=1, max_value=2**62))
@example(2**20 - 1)
@example(1023 * 2**30 + 2**30 - 1)
def test_what_is_shown_reads_back_within_its_two_decimals(count: int) -> None:
    shown = format_bytes(count)
    unit = shown.split()[1]
    # The tolerance is half of the last decimal shown, and one byte for rounding down.
    assert abs(parse_bytes(shown) - count) <= UNITS[unit] * 0.005 * (1 + 1e-9) + 1
    assert "1024" not in shown or unit == "TiB"


@given(st.integers(min_value=1, max_value=2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_whole_number_of_units_is_exact(number: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]


@pytest.mark.slow
@given(st.text(max_size=12))
def test_any_text_gives_a_size_or_a_value_error(text: str) -> None:
    try:
        count = parse_bytes(text)
    except ValueError:
        return
    assert 1 <= count <= MAX_BYTES


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1, "1 B"), (1 << 20, "1.00 MiB"), ((1 << 20) + 1, "1048577 bytes")]
)
def test_an_exact_text_is_never_rounded(count: int, text: str) -> None:
    assert exact_bytes(count) == text
