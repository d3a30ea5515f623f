"""The tables of what stays, made with a small decoder."""

from __future__ import annotations

import pytest
import torch

from benchmarks.whole_state import what_stays
from benchmarks.whole_state.sessions import Made, blocks, plain


@pytest.fixture
def peak_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    def make() -> Made:
        return blocks(256, 2), torch.ones(2, 128, 256)

    monkeypatch.setattr(what_stays, "make", make)
    return plain(make, what_stays.MACHINE)[1]


def test_state_that_has_room_stays_and_makes_the_step_shorter(peak_bytes: int) -> None:
    ((share, away, decided, predicted, stays),) = what_stays.decided_rows(peak_bytes, (0.95,), what_stays.STATE_ALONE)
    assert share == "95%"
    assert float(decided.split()[0]) < float(away.split()[0])
    assert decided == predicted
    assert stays.endswith("MiB of the optimizers' state")
