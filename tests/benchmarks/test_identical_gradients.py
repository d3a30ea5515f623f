"""The real run of `make bench`: bytes move, gradients are identical, and a difference would be detected."""

from __future__ import annotations

import io

import pytest
import torch

from benchmarks.models.vgg import vgg
from benchmarks.progress import Progress
from benchmarks.vdnn_paper import identical_gradients
from benchmarks.vdnn_paper.identical_gradients import compare_all, render_identity, same_bits
from tests.drawn import quick_and_full
from vdnn.bytesize import parse_bytes

pytestmark = pytest.mark.slow


@quick_and_full("narrowing", 2, 1)
def test_every_way_has_the_gradients_of_plain_pytorch(narrowing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the channels with windows to match, or the network of the benchmark."""
    monkeypatch.setattr(
        identical_gradients, "vgg16", lambda batch, side: vgg(batch, added=0, side=side, narrowing=narrowing)
    )
    for window in ("OFFLOAD_WINDOW", "RELOAD_WINDOW"):
        nbytes = parse_bytes(getattr(identical_gradients, window)) // narrowing
        monkeypatch.setattr(identical_gradients, window, str(nbytes))
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
