"""The CPU reference against formulas of numpy, torch and plain Python that share nothing with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.cases import KERNELS, Case, Kernel, cases_of, expected_target, kernel_name, source_bytes
from tests.codec.host_memory import reference_target, target_bytes
from vdnn import _C


@pytest.mark.parametrize("kernel", KERNELS, ids=kernel_name)
def test_reference_equals_numpy_at_every_size_and_alignment(kernel: Kernel) -> None:
    for case in cases_of(kernel):
        content = case.source()
        assert reference_target(case, content) == expected_target(kernel, case.count, content), case


@pytest.mark.parametrize("kernel", KERNELS, ids=kernel_name)
def test_a_call_knows_its_byte_counts(kernel: Kernel) -> None:
    for case in cases_of(kernel):
        call = case.call(source=1 << 20, target=1 << 40)
        assert call.source_bytes == source_bytes(kernel, case.count), case
        assert call.target_bytes == target_bytes(kernel, case.count), case


@given(st.binary(max_size=300), st.sampled_from(KERNELS), st.integers(0, 15), st.integers(0, 15))
def test_reference_equals_numpy_on_any_content(
    content: bytes, kernel: Kernel, source_offset: int, target_offset: int
) -> None:
    count = len(content) * 8 if kernel == Kernel.UNPACK_BITS else len(content)
    if kernel == Kernel.CONTENT_HASH:
        target_offset = target_offset // 8 * 8
    case = Case(kernel, count, source_offset, target_offset)
    assert reference_target(case, content) == expected_target(kernel, count, content)


@given(st.lists(st.integers(0, 255), max_size=200))
def test_a_mask_comes_back_as_zeros_and_ones(mask: list[int]) -> None:
    packed = reference_target(Case(Kernel.PACK_BITS, len(mask)), bytes(mask))
    assert len(packed) == -(-len(mask) // 8)
    back = reference_target(Case(Kernel.UNPACK_BITS, len(mask)), packed)
    assert list(back) == [int(element != 0) for element in mask]


def test_bits_after_the_last_element_are_written_as_zero_and_not_read() -> None:
    packed = reference_target(Case(Kernel.PACK_BITS, 11), b"\xff" * 11)
    assert packed == bytes([0b11111111, 0b00000111])
    unpacked = reference_target(Case(Kernel.UNPACK_BITS, 3), bytes([0b11111101]))
    assert unpacked == bytes([1, 0, 1])


def test_every_byte_but_zero_packs_to_a_one() -> None:
    packed = reference_target(Case(Kernel.PACK_BITS, 256), bytes(range(256)))
    assert packed == bytes([0b11111110]) + b"\xff" * 31


def test_a_boolean_mask_of_torch_comes_back_bit_for_bit() -> None:
    mask = torch.rand(1001, generator=torch.Generator().manual_seed(1)) < 0.5
    packed = torch.empty(126, dtype=torch.uint8)
    _C.run_on_cpu(_C.KernelCall(Kernel.PACK_BITS, mask.data_ptr(), packed.data_ptr(), mask.numel()))
    back = torch.ones_like(mask)
    _C.run_on_cpu(_C.KernelCall(Kernel.UNPACK_BITS, packed.data_ptr(), back.data_ptr(), mask.numel()))
    assert torch.equal(back, mask)
