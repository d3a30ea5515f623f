"""The CPU reference against formulas of numpy, torch and plain Python that share nothing with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.cases import SHAPES, Case, Kernel, Shape, cases_of, expected_target
from tests.codec.host_memory import reference_target, target_bytes
from vdnn import _C

INTEGER_PAIRS = [(1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_equals_numpy_at_every_size_and_alignment(shape: Shape) -> None:
    for case in cases_of(shape):
        content = case.source()
        assert reference_target(case, content) == expected_target(shape, case.count, content), case


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_call_knows_its_byte_counts(shape: Shape) -> None:
    for case in cases_of(shape):
        call = case.call(source=1 << 20, target=1 << 40)
        assert call.source_bytes == shape.source_bytes(case.count), case
        assert call.target_bytes == target_bytes(shape, case.count), case


@given(st.binary(max_size=300), st.sampled_from(SHAPES), st.integers(0, 15), st.integers(0, 15))
def test_reference_equals_numpy_on_any_content(
    content: bytes, shape: Shape, source_offset: int, target_offset: int
) -> None:
    content = content[: len(content) // shape.source_width * shape.source_width]
    count = len(content) // shape.source_width
    if shape.kernel == Kernel.UNPACK_BITS:
        count = len(content) * 8
    if shape.kernel == Kernel.CONTENT_HASH:
        target_offset = target_offset // 8 * 8
    case = Case(shape, count, source_offset, target_offset)
    assert reference_target(case, content) == expected_target(shape, count, content)


@pytest.mark.parametrize(("narrow", "wide"), INTEGER_PAIRS)
@given(data=st.data())
def test_integers_that_fit_come_back_whole(narrow: int, wide: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2 ** (8 * narrow) - 1), max_size=100))
    content = np.array(values, f"<u{wide}").tobytes()
    there = reference_target(Case(Shape(Kernel.NARROW_INTEGERS, wide, narrow), len(values)), content)
    back = reference_target(Case(Shape(Kernel.WIDEN_INTEGERS, narrow, wide), len(values)), there)
    assert back == content


@given(st.lists(st.integers(0, 255), max_size=200))
def test_a_mask_comes_back_as_zeros_and_ones(mask: list[int]) -> None:
    packed = reference_target(Case(Shape(Kernel.PACK_BITS), len(mask)), bytes(mask))
    assert len(packed) == -(-len(mask) // 8)
    back = reference_target(Case(Shape(Kernel.UNPACK_BITS), len(mask)), packed)
    assert list(back) == [int(element != 0) for element in mask]


def test_bits_after_the_last_element_are_written_as_zero_and_not_read() -> None:
    packed = reference_target(Case(Shape(Kernel.PACK_BITS), 11), b"\xff" * 11)
    assert packed == bytes([0b11111111, 0b00000111])
    unpacked = reference_target(Case(Shape(Kernel.UNPACK_BITS), 3), bytes([0b11111101]))
    assert unpacked == bytes([1, 0, 1])


def test_every_byte_but_zero_packs_to_a_one() -> None:
    packed = reference_target(Case(Shape(Kernel.PACK_BITS), 256), bytes(range(256)))
    assert packed == bytes([0b11111110]) + b"\xff" * 31


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("narrow", [torch.uint8, torch.int16, torch.int32], ids=_dtype_name)
def test_pooling_indices_of_torch_come_back_bit_for_bit(narrow: torch.dtype) -> None:
    wide = torch.arange(121, dtype=torch.int64).reshape(11, 11).T.contiguous()
    narrowed = torch.full(wide.shape, 77, dtype=narrow)
    count, width = wide.numel(), narrow.itemsize
    _C.run_on_cpu(_C.KernelCall(Kernel.NARROW_INTEGERS, wide.data_ptr(), narrowed.data_ptr(), count, 8, width))
    assert torch.equal(narrowed, wide.to(narrow))
    back = torch.full_like(wide, -1)
    _C.run_on_cpu(_C.KernelCall(Kernel.WIDEN_INTEGERS, narrowed.data_ptr(), back.data_ptr(), count, width, 8))
    assert torch.equal(back, wide)


def test_a_boolean_mask_of_torch_comes_back_bit_for_bit() -> None:
    mask = torch.rand(1001, generator=torch.Generator().manual_seed(1)) < 0.5
    packed = torch.empty(126, dtype=torch.uint8)
    _C.run_on_cpu(_C.KernelCall(Kernel.PACK_BITS, mask.data_ptr(), packed.data_ptr(), mask.numel()))
    back = torch.ones_like(mask)
    _C.run_on_cpu(_C.KernelCall(Kernel.UNPACK_BITS, packed.data_ptr(), back.data_ptr(), mask.numel()))
    assert torch.equal(back, mask)
