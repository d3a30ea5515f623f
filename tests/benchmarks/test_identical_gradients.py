"""The real run of `make bench`: bytes move, gradients are identical, and a difference would be detected."""

from __future__ import annotations

import io

import pytest
import torch

from benchmarks.progress import Progress
from benchmarks.vdnn_paper.identical_gradients import compare_all, render_identity, same_bits

pytestmark = pytest.mark.slow


def test_every_way_has_the_gradients_of_plain_pytorch() -> None:
    rows = compare_all(Progress("test", 9, stream=io.StringIO()))
    assert all(row.identical for row in rows), render_identity(rows)
    moved = {row.name.split()[0]: (row.to_host_bytes > 0, row.to_device_bytes > 0) for row in rows}
    assert moved == {
        "plain": (False, False),
        "keep": (False, False),
        "vdnn-all": (True, True),
        "vdnn-conv": (True, True),
        "budget": (True, True),
    }


def test_a_bit_makes_a_difference() -> None:
    zero, minus_zero = torch.tensor([0.0]), torch.tensor([-0.0])
    assert torch.equal(zero, minus_zero)
    assert not same_bits([zero], [minus_zero])
    nan = torch.tensor([float("nan")])
    assert same_bits([nan], [nan.clone()])
