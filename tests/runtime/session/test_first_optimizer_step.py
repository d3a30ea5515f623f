"""Measures the memory of the first step of an optimizer, before any run."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vdnn.runtime.session.first_optimizer_step import bytes_of_step


def test_a_learning_rate_in_a_tensor_is_taken_for_its_number(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for lr in (1e-2, torch.tensor(1e-2)):
        parameter = nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.AdamW([parameter], lr=lr)
        with caplog.at_level(logging.WARNING):
            found.append(bytes_of_step(optimizer, optimizer.param_groups[0], parameter))
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0] >= 2 * parameter.nbytes
    assert caplog.records == [], "torch logs an error where a copy of a tensor is made without data"


def test_a_learning_rate_without_data_is_no_error() -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.AdamW([parameter], lr=1e-2)
        optimizer.param_groups[0]["lr"] = torch.empty(())
        assert bytes_of_step(optimizer, optimizer.param_groups[0], parameter) is None


def test_an_optimizer_that_draws_leaves_the_programs_random_numbers_as_they_were() -> None:
    class Draws(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            random.random()
            return super().step(closure)

    parameter = nn.Parameter(torch.zeros(64, 64))
    optimizer = Draws([parameter], lr=1e-2)
    random.seed(1)
    expected = random.random()
    random.seed(1)
    assert bytes_of_step(optimizer, optimizer.param_groups[0], parameter) is not None
    assert random.random() == expected
