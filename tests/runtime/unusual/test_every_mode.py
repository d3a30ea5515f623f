"""Tests of the rig itself: in every mode it finds a difference, and an error that only one of the two runs raises."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from tests.runtime.unusual.every_mode import MODES, PLAN_MODES, Step, assert_same_error_in, assert_same_in
from tests.runtime.unusual.small_networks import steps_on
from vdnn.runtime.session.session import active_session
from vdnn.step.plan import Action


def _trained() -> Step:
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)]
    model = nn.Sequential(*layers)
    return steps_on(lambda index: model(torch.randn(24, 16) + index).square().mean(), model, lr=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_a_program_is_the_same_and_its_saves_are_moved(mode: str) -> None:
    session = assert_same_in(mode, _trained)
    assert session.counters.storages + session.counters.discarded, session.report()


@pytest.mark.parametrize("mode", PLAN_MODES)
def test_a_plan_is_followed(mode: str) -> None:
    session = assert_same_in(mode, _trained)
    assert session.plan is not None
    assert any(one.action is not Action.KEEP for one in session.plan.lifetimes) or mode == "plan at 90 %"


@pytest.mark.parametrize("mode", MODES)
def test_one_bit_in_one_step_is_found(mode: str) -> None:
    def differing() -> Step:
        step = _trained()

        def flawed(index: int) -> Iterable[torch.Tensor | None]:
            found = [None if one is None else one.detach().clone() for one in step(index)]
            if index == 6 and active_session() is not None and found[1] is not None:
                found[1].view(torch.uint8)[0, 0] ^= 1
            return found

        return flawed

    with pytest.raises(AssertionError, match=r"step 6 differs in \['float32\[32, 16\] by up to"):
        assert_same_in(mode, differing)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_session_alone_is_found(mode: str) -> None:
    def raising() -> Step:
        step = _trained()

        def flawed(index: int) -> Iterable[torch.Tensor | None]:
            if index == 5 and active_session() is not None:
                raise RuntimeError("only here")
            return step(index)

        return flawed

    with pytest.raises(RuntimeError, match="only here"):
        assert_same_in(mode, raising)


def _modifying() -> Step:
    weight = nn.Parameter(torch.randn(8))

    def step(index: int) -> Iterable[torch.Tensor | None]:
        x = weight.exp()
        loss = x.square().sum()
        if index == 5:
            x.add_(1)
        weight.grad = None
        loss.backward()
        return [loss, weight.grad]

    return step


@pytest.mark.parametrize("mode", MODES)
def test_the_same_error_in_the_same_step_is_the_same(mode: str) -> None:
    assert_same_error_in(mode, _modifying, RuntimeError, "modified by an inplace operation")


def test_another_error_is_found() -> None:
    with pytest.raises(AssertionError, match="plain torch: expected RuntimeError: no such words"):
        assert_same_error_in("vdnn-all", _modifying, RuntimeError, "no such words")
