"""Converts sizes from text to bytes ("12GiB" is 12884901888) and back for messages.

Elsewhere in the package a size is an integer in bytes, with the unit in its name. parse_bytes refuses a unit that could
mean two things ("12G"), a fraction without a unit, zero, and a bool. It raises ValueError and TypeError, not the
classes of vdnn.errors, because vdnn.errors imports this module.
"""

from __future__ import annotations

import re
from fractions import Fraction

UNITS: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# The largest signed 64-bit integer. A larger size is a typing error on every machine.
MAX_BYTES = 2**63 - 1

_EXPECTED = 'a size such as "12GiB", "1.5 GB" or an int of bytes'
_SIZE = re.compile(r"\s*(?P<sign>[+-]?)(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)


def parse_bytes(size: str | int) -> int:
    """The number of bytes that `size` names, at least 1.

    Computed exactly: "0.3GiB" is not a whole number of bytes and is rounded down, so that a budget is never
    more than what was asked for. GiB is 2**30 and GB is 10**9.
    """
    if isinstance(size, bool):
        raise TypeError(f"expected {_EXPECTED}, got the bool {size!r}. Write the size itself.")
    if isinstance(size, int):
        return _in_range(size, shown=str(size))
    if isinstance(size, str):
        return _parse_text(size)
    if isinstance(size, float):
        raise TypeError(f"expected {_EXPECTED}, got the float {size!r}. Write it as an int, or as a str with a unit.")
    raise TypeError(f"expected {_EXPECTED}, got {type(size).__name__} {size!r}.")


def format_bytes(count: int) -> str:
    """`count` bytes for a message: "4.00 GiB", in the largest binary unit that gives at least 1.00."""
    magnitude = abs(count)
    sign = "-" if count < 0 else ""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        # At and above this, two decimals of the next smaller unit would round to "1024.00".
        if magnitude >= UNITS[unit] * 0.999995:
            return f"{sign}{magnitude / UNITS[unit]:.2f} {unit}"
    return f"{sign}{magnitude} B"


def exact_bytes(count: int) -> str:
    """The same, in bytes where the text would be rounded."""
    text = format_bytes(count)
    return text if count > 0 and parse_bytes(text) == count else f"{count} bytes"


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {_EXPECTED}, got {text!r}.")
    number, unit = match["number"], match["unit"]
    if match["sign"] == "-":
        raise ValueError(f"expected a size above zero, got {text!r}.")
    if unit == "":
        if not number.isdigit():
            raise ValueError(f"expected {_EXPECTED}, got {text!r}: a fraction needs a unit.")
        return _in_range(int(number), shown=repr(text))
    if unit not in UNITS:
        raise ValueError(f"expected {_EXPECTED}, got {text!r}: {_unknown_unit(unit)}")
    return _in_range(int(Fraction(number) * UNITS[unit]), shown=repr(text))


def _unknown_unit(unit: str) -> str:
    """The advice for a unit that is not in UNITS: the two that a short form may mean, or all units."""
    letter = unit[0].upper()
    if unit.lower().rstrip("b").rstrip("i") == letter.lower() and letter in "KMGT":
        return f"{unit!r} is not a unit; write {letter}iB (powers of 1024) or {letter}B (powers of 1000)."
    return f"{unit!r} is not a unit; the units are {', '.join(UNITS)}."


def _in_range(count: int, *, shown: str) -> int:
    if count < 1:
        raise ValueError(f"expected a size of at least 1 byte, got {shown}.")
    if count > MAX_BYTES:
        raise ValueError(f"expected a size of at most {format_bytes(MAX_BYTES)}, got {shown}.")
    return count
