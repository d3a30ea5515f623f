"""The bytes that an operation moves: what its kernel reads and writes, not what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vdnn.runtime.machine.memory_traffic import traffic_bytes

ATEN = torch.ops.aten
ROWS, COLUMNS = 48, 1000
MAP = ROWS * COLUMNS * 4


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*(shape or (ROWS, COLUMNS)), dtype=dtype, device="meta")


def moved(func: Any, *args: Any, out: Any = None, **kwargs: Any) -> int:
    return traffic_bytes(func, args, kwargs, out)


def test_a_result_is_written_and_operands_are_read() -> None:
    assert moved(ATEN.add.Tensor, x(), x(), out=x()) == 3 * MAP
    assert moved(ATEN.add_.Tensor, x(), x(), out=x()) == 3 * MAP


def test_lists_that_are_written_in_place_count_as_written() -> None:
    lists = [[x(), x()] for _ in range(3)]
    assert moved(ATEN._foreach_mul_.Scalar, lists[0], 2.0) == 4 * MAP
    assert moved(ATEN._foreach_addcmul_.Scalar, *lists) == (6 + 2) * MAP


@pytest.mark.parametrize("func", [ATEN.zero_.default, ATEN.zeros_like.default, ATEN.rand_like.default])
def test_what_is_overwritten_or_only_has_the_shape_is_not_read(func: Any) -> None:
    assert moved(func, x(), out=x()) == MAP


def test_a_copy_reads_its_source_alone() -> None:
    half = x(dtype=torch.float16)
    assert moved(ATEN.copy_.default, half, x(), out=half) == MAP // 2 + MAP
    assert moved(ATEN._foreach_copy_.default, [half], [x()]) == MAP // 2 + MAP


def test_a_lookup_reads_the_rows_that_it_writes_and_at_most_the_table() -> None:
    table, indices = x(50000, 64), x(8, dtype=torch.int64)
    assert moved(ATEN.embedding.default, table, indices, out=x(8, 64)) == 2 * 8 * 64 * 4 + 8 * 8
    small = x(2, 64)
    assert moved(ATEN.embedding.default, small, indices, out=x(8, 64)) == (2 + 8) * 64 * 4 + 8 * 8


def test_a_loss_and_its_gradient_read_one_value_of_a_row() -> None:
    classes, one = x(ROWS, dtype=torch.int64), x(1)
    forward = moved(ATEN.nll_loss_forward.default, x(), classes, None, 1, -100, out=(one, one))
    assert forward < MAP / 100
    backward = moved(ATEN.nll_loss_backward.default, one, x(), classes, None, 1, -100, one, out=x())
    assert MAP < backward < 1.01 * MAP


def test_the_gradient_of_a_pooling_goes_by_its_indices() -> None:
    large, small, indices = x(2, 8, 16, 16), x(2, 8, 8, 8), x(2, 8, 8, 8, dtype=torch.int64)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    got = moved(ATEN.max_pool2d_with_indices_backward.default, small, large, *window, indices, out=large)
    assert got == 2 * 8 * (64 * 4 + 256 * 4 + 64 * 8)


def test_the_gradients_of_a_norms_weights_read_gradient_and_input_again() -> None:
    weight, mean = x(COLUMNS), x(ROWS, 1)
    got = moved(
        *(ATEN.native_layer_norm_backward.default, x(), x(), [COLUMNS], mean, mean, weight, weight, [True] * 3),
        out=(x(), weight, weight),
    )
    assert got == 5 * MAP + 4 * COLUMNS * 4 + 2 * ROWS * 4
