"""A KernelCall as a value: its facts, and the message for every argument that it refuses."""

from __future__ import annotations

import pytest

from vdnn import _C
from vdnn.errors import InvalidArgumentError

Kernel = _C.Kernel
SOURCE = 0x10000
TARGET = 0x20000
LARGEST = 2**64 - 1
PACK, UNPACK, HASH = Kernel.PACK_BITS, Kernel.UNPACK_BITS, Kernel.CONTENT_HASH
WITHIN = "a range that ends within the address space"
APART = "a range that does not overlap the source, "


def test_a_call_shows_its_arguments() -> None:
    call = _C.KernelCall(kernel=Kernel.PACK_BITS, source=SOURCE, target=TARGET, count=24)
    assert (call.kernel, call.source, call.target, call.count) == (Kernel.PACK_BITS, SOURCE, TARGET, 24)
    assert (call.source_bytes, call.target_bytes) == (24, 3)
    assert repr(call) == "KernelCall(PACK_BITS, source=0x10000, target=0x20000, count=24)"


def test_a_call_cannot_be_changed_after_its_check() -> None:
    call = _C.KernelCall(Kernel.PACK_BITS, SOURCE, TARGET, 8)
    for name in ("kernel", "source", "target", "count"):
        with pytest.raises(AttributeError):
            setattr(call, name, 1)


# The error's (argument, expected, got), and the arguments of the call.
REFUSED: list[tuple[str, str, str, tuple[object, ...]]] = [
    ("kernel", "a kernel number from 0 to 2", "3", (Kernel(3), SOURCE, TARGET, 1)),
    ("source", "a non-null address for 24 bytes", "0", (PACK, 0, TARGET, 24)),
    ("target", "a non-null address for 2 bytes", "0", (PACK, SOURCE, 0, 9)),
    # A hash writes to its target even for a source of no bytes.
    ("target", "a non-null address for 8 bytes", "0", (HASH, 0, 0, 0)),
    ("source", WITHIN, "16 bytes at 0xfffffffffffffff1", (HASH, LARGEST - 14, TARGET, 16)),
    ("source", WITHIN, f"{LARGEST} bytes at 0x10000", (PACK, SOURCE, TARGET, LARGEST)),
    ("target", WITHIN, f"{LARGEST} bytes at 0x20000", (UNPACK, SOURCE, TARGET, LARGEST)),
    ("target", f"{APART}64 bytes at 0x10000", "8 bytes at 0x1003f", (PACK, SOURCE, SOURCE + 63, 64)),
    ("target", f"{APART}8 bytes at 0x1003f", "64 bytes at 0x10000", (UNPACK, SOURCE + 63, SOURCE, 64)),
    ("target", f"{APART}8 bytes at 0x10000", "1 bytes at 0x10000", (PACK, SOURCE, SOURCE, 8)),
    ("target", "an address divisible by 8, because", "8 bytes at 0x20004", (HASH, SOURCE, TARGET + 4, 8)),
]


@pytest.mark.parametrize(("argument", "expected", "got", "arguments"), REFUSED)
def test_a_bad_argument_is_refused_by_name(
    argument: str, expected: str, got: str, arguments: tuple[object, ...]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        _C.KernelCall(*arguments)
    message = str(caught.value)
    assert caught.value.argument == argument, message
    assert expected in caught.value.expected, message
    assert caught.value.got == got, message
    for fact in (argument, expected, got):
        assert fact in message


@pytest.mark.parametrize("name", ["source", "target", "count"])
@pytest.mark.parametrize("value", [-1, -(2**63), 2**64, 1.5, "1", None], ids=repr)
def test_what_is_no_unsigned_64_bit_integer_is_a_type_error(name: str, value: object) -> None:
    arguments = {"source": SOURCE, "target": TARGET, "count": 1}
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _C.KernelCall(PACK, **{**arguments, name: value})


def test_ranges_that_touch_are_apart() -> None:
    _C.KernelCall(PACK, SOURCE, SOURCE + 64, 64)
    _C.KernelCall(PACK, SOURCE, SOURCE - 8, 64)


def test_a_range_may_end_with_the_address_space() -> None:
    call = _C.KernelCall(Kernel.CONTENT_HASH, LARGEST - 15, TARGET, 16)
    assert call.source_bytes == 16


def test_a_call_of_no_elements_needs_no_addresses() -> None:
    for kernel in (PACK, UNPACK):
        _C.run_on_cpu(_C.KernelCall(kernel, 0, 0, 0))


def test_the_build_has_device_code_or_says_why_not() -> None:
    reason = _C.device_code_missing_reason()
    assert _C.device_code_present() == (reason == "")
    assert reason == "" or "build again" in reason
