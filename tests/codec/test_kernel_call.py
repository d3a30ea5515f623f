"""A KernelCall as a value: its facts, and every argument that it refuses, with the sentence."""

from __future__ import annotations

import pytest

from vdnn import _C
from vdnn.errors import InvalidArgumentError

Kernel = _C.Kernel
SOURCE = 0x10000
TARGET = 0x20000
LARGEST = 2**64 - 1
NARROW, WIDEN, PACK = Kernel.NARROW_INTEGERS, Kernel.WIDEN_INTEGERS, Kernel.PACK_BITS
UNPACK, HASH = Kernel.UNPACK_BITS, Kernel.CONTENT_HASH
WITHIN = "a range that ends within the address space"
APART = "a range apart from the source, "


def test_a_call_shows_its_arguments() -> None:
    call = _C.KernelCall(
        kernel=Kernel.NARROW_INTEGERS, source=SOURCE, target=TARGET, count=3, source_width=8, target_width=2
    )
    assert (call.kernel, call.source, call.target, call.count) == (Kernel.NARROW_INTEGERS, SOURCE, TARGET, 3)
    assert (call.source_width, call.target_width) == (8, 2)
    assert (call.source_bytes, call.target_bytes) == (24, 6)
    assert repr(call) == (
        "KernelCall(NARROW_INTEGERS, source=0x10000, target=0x20000, count=3, source_width=8, target_width=2)"
    )


def test_a_call_cannot_be_changed_after_its_check() -> None:
    call = _C.KernelCall(Kernel.PACK_BITS, SOURCE, TARGET, 8)
    for name in ("kernel", "source", "target", "count", "source_width", "target_width"):
        with pytest.raises(AttributeError):
            setattr(call, name, 1)


# (argument, expected, got) of the error, and the arguments of the call.
REFUSED: list[tuple[str, str, str, tuple[object, ...]]] = [
    ("kernel", "a kernel's number, 0 to 4", "5", (Kernel(5), SOURCE, TARGET, 1)),
    ("source_width", "1, 2, 4 or 8", "3", (NARROW, SOURCE, TARGET, 1, 3, 1)),
    ("source_width", "1, 2, 4 or 8", "0", (WIDEN, SOURCE, TARGET, 1, 0, 1)),
    ("target_width", "1, 2, 4 or 8", "16", (WIDEN, SOURCE, TARGET, 1, 1, 16)),
    ("target_width", "less than source_width, 4", "4", (NARROW, SOURCE, TARGET, 1, 4, 4)),
    ("target_width", "less than source_width, 2", "8", (NARROW, SOURCE, TARGET, 1, 2, 8)),
    ("target_width", "more than source_width, 8", "8", (WIDEN, SOURCE, TARGET, 1, 8, 8)),
    ("target_width", "more than source_width, 4", "2", (WIDEN, SOURCE, TARGET, 1, 4, 2)),
    ("source_width", "1, as vdnn_pack_bits counts", "2", (PACK, SOURCE, TARGET, 1, 2, 1)),
    ("target_width", "1, as vdnn_unpack_bits counts", "8", (UNPACK, SOURCE, TARGET, 1, 1, 8)),
    ("source_width", "1, as vdnn_content_hash counts", "8", (HASH, SOURCE, TARGET, 1, 8)),
    ("source", "an address, as 24 bytes are there", "0", (NARROW, 0, TARGET, 3, 8, 1)),
    ("target", "an address, as 2 bytes are there", "0", (PACK, SOURCE, 0, 9)),
    # A hash has a target even of no bytes.
    ("target", "an address, as 8 bytes are there", "0", (HASH, 0, 0, 0)),
    ("source", WITHIN, "16 bytes at 0xfffffffffffffff1", (HASH, LARGEST - 14, TARGET, 16)),
    ("source", WITHIN, f"{LARGEST} bytes at 0x10000", (NARROW, SOURCE, TARGET, 2**61 + 1, 8, 1)),
    ("target", WITHIN, f"{LARGEST} bytes at 0x20000", (UNPACK, SOURCE, TARGET, LARGEST)),
    ("target", f"{APART}64 bytes at 0x10000", "8 bytes at 0x1003f", (NARROW, SOURCE, SOURCE + 63, 8, 8, 1)),
    ("target", f"{APART}8 bytes at 0x1003f", "64 bytes at 0x10000", (WIDEN, SOURCE + 63, SOURCE, 8, 1, 8)),
    ("target", f"{APART}8 bytes at 0x10000", "1 bytes at 0x10000", (PACK, SOURCE, SOURCE, 8)),
    ("target", "an address divisible by 8, as blocks", "8 bytes at 0x20004", (HASH, SOURCE, TARGET + 4, 8)),
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


@pytest.mark.parametrize("name", ["source", "target", "count", "source_width", "target_width"])
@pytest.mark.parametrize("value", [-1, -(2**63), 2**64, 1.5, "1", None], ids=repr)
def test_what_is_no_unsigned_64_bit_integer_is_a_type_error(name: str, value: object) -> None:
    arguments = {"source": SOURCE, "target": TARGET, "count": 1, "source_width": 8, "target_width": 1}
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _C.KernelCall(NARROW, **{**arguments, name: value})


def test_ranges_that_touch_are_apart() -> None:
    _C.KernelCall(Kernel.NARROW_INTEGERS, SOURCE, SOURCE + 64, 8, 8, 1)
    _C.KernelCall(Kernel.NARROW_INTEGERS, SOURCE, SOURCE - 8, 8, 8, 1)


def test_a_range_may_end_with_the_address_space() -> None:
    call = _C.KernelCall(Kernel.CONTENT_HASH, LARGEST - 15, TARGET, 16)
    assert call.source_bytes == 16


def test_a_call_of_no_elements_needs_no_addresses() -> None:
    for kernel, source_width, target_width in [(NARROW, 8, 1), (WIDEN, 1, 8), (PACK, 1, 1), (UNPACK, 1, 1)]:
        _C.run_on_cpu(_C.KernelCall(kernel, 0, 0, 0, source_width, target_width))


def test_the_build_has_device_code_or_says_why_not() -> None:
    reason = _C.device_code_missing_reason()
    assert _C.device_code_present() == (reason == "")
    assert reason == "" or "build again" in reason
