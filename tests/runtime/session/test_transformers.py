"""Architectures of transformers, tiny and random: loss and every gradient are the same bits as plain PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import SCHEDULES
from tests.runtime.conftest import EITHER_WAY
from tests.runtime.rigs.architectures import NAMES, build
from tests.runtime.rigs.side_by_side import assert_same_as_plain, differences, outcome
from vdnn import _C
from vdnn.runtime.session.session import Session

pytestmark = [
    pytest.mark.slow,
    EITHER_WAY,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

# To save time, each runs under one schedule, in turn. Smaller models test the differences between schedules.
CASES = [pytest.param(SCHEDULES[index % len(SCHEDULES)], name, id=name) for index, name in enumerate(NAMES)]


def loss_of(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs).loss
    loss.backward()
    return loss


@pytest.mark.parametrize(("schedule", "name"), CASES, indirect=["schedule"])
def test_an_architecture_is_the_same_as_plain(schedule: _C.Schedule, session: Session, name: str) -> None:
    model, inputs = build(name)
    first, second = (outcome(lambda: loss_of(model, inputs), [model]) for _ in range(2))
    assert not differences(first, second), "two plain runs differ: nothing can be compared"
    assert_same_as_plain(session, lambda: loss_of(model, inputs), model)


def test_there_are_at_least_thirty_architectures() -> None:
    assert len(NAMES) >= 30
