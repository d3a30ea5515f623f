"""A tolerance is an opt-in: a recipe that is not exact is used only within it, and is named in log and report."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.side_by_side import assert_same_as_plain
from tests.runtime.rigs.virtual_training import decided_by, recompute_all
from vdnn.planning.recomputing import candidates_of
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute import table
from vdnn.runtime.recompute.tolerance import difference_between
from vdnn.runtime.recompute.trial import bytes_of
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Plan

APART = 2.0**-12  # the relative error of the ReLU in these tests
OVER, UNDER = 2.0**-11, 2.0**-13
SIZE = (32, 16)


class Scaled(nn.Module):
    """The gradient of `scale` is the output of the ReLU, which is recomputed from the save of the sine. The gradient of
    `tanh_scale` is the tanh of that output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.tanh_scale = (nn.Parameter(torch.randn(SIZE)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x * self.weight
        outer = inner.relu()
        return inner.sin().sum() + (outer * self.scale).sum() + (outer.tanh() * self.tanh_scale).sum()


def make_relu(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    wrong = dataclasses.replace(table._TABLE["ReluBackward0"], run=run)
    monkeypatch.setitem(table._TABLE, "ReluBackward0", wrong)


@pytest.fixture
def relu_is_a_little_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    make_relu(monkeypatch, lambda call, x: torch.relu(x) * (1 + APART))


def gradients_under(session: Session, model: Scaled, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    with session:
        model(x).backward()
        session.step()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def require_close_in_scale_alone(found: list[torch.Tensor], plain: list[torch.Tensor], tolerance: float) -> None:
    """The gradient of `scale` is the recomputed value. The tanh of that value is not recomputed, so it is exact."""
    apart = (found[1] - plain[1]).abs().max()
    assert 0 < apart <= tolerance * plain[1].abs().max()
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[2], plain[2])


@pytest.mark.usefixtures("relu_is_a_little_wrong")
def test_within_the_tolerance_it_is_recomputed_and_named_once(
    open_session: OpenSession, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Scaled(), torch.randn(SIZE)
    plain = gradients_under(vdnn.offload("keep", device="sim"), model, x)
    session = open_session("recompute-all", tolerance=OVER)
    with caplog.at_level(logging.INFO, "vdnn"):
        for _ in range(3):
            require_close_in_scale_alone(gradients_under(session, model, x), plain, OVER)
    said = [record.getMessage() for record in caplog.records if "relu" in record.getMessage()]
    assert len(said) == 1
    assert "relu" in said[0]
    assert "is recomputed within the tolerance of 0.000488281" in said[0]
    assert "recomputed within the tolerance of 0.000488281: relu" in session.report()
    assert f"(difference: {APART:.2g} of the largest magnitude)" in session.report()


@pytest.mark.usefixtures("relu_is_a_little_wrong")
@pytest.mark.parametrize("tolerance", [None, UNDER, 0])
def test_without_or_over_the_tolerance_it_is_not_recomputed(
    open_session: OpenSession, caplog: pytest.LogCaptureFixture, tolerance: float | None
) -> None:
    model, x = Scaled(), torch.randn(SIZE)
    session = open_session("recompute-all", tolerance=tolerance)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING, "vdnn"):
        assert_same_as_plain(session, step, model)
    wanted = "bit for bit" if tolerance is None else f"tolerance of {tolerance:g} (difference: {APART:.2g} of the"
    said = [record.getMessage() for record in caplog.records if wanted in record.getMessage()]
    assert len(said) == 1
    assert "relu" in said[0]
    assert "it is not recomputed" in said[0]


@pytest.mark.usefixtures("relu_is_a_little_wrong")
def test_a_plan_recomputes_within_the_tolerance_and_integrity_mode_agrees() -> None:
    model, x = Scaled(), torch.randn(SIZE)
    with VirtualMachine("titan-x", fake=False) as machine:

        def trained(policy: Plan | str, **options: Any) -> tuple[Session, list[torch.Tensor]]:
            session = vdnn.offload(**decided_by(policy), device=machine, measure=True, min_bytes=0, **options)
            for _ in range(3):
                gradients = gradients_under(session, model, x)
            return session, gradients

        exact, plain = trained("vdnn-all")
        recorded, _ = trained("vdnn-all", tolerance=OVER)
        assert exact.recording is not None
        assert recorded.recording is not None
        more = set(candidates_of(recorded.recording)) - set(candidates_of(exact.recording))
        recomputes = [recorded.recording.lifetimes[one].recompute for one in more]
        assert [one.operation for one in recomputes if one is not None] == ["relu <- mul"]
        plan = recompute_all(recorded.recording, offload_rest=True)
        followed, gradients = trained(plan, tolerance=OVER, integrity=True)
        require_close_in_scale_alone(gradients, plain, OVER)
        assert "differs from the plan" not in followed.report()
        assert " 0 differ" in followed.report()
        without, gradients = trained(plan)
        assert "cannot be recomputed here" in without.report()
        assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))


def test_what_is_not_finite_has_to_come_back(
    monkeypatch: pytest.MonkeyPatch, open_session: OpenSession, caplog: pytest.LogCaptureFixture
) -> None:
    make_relu(monkeypatch, lambda call, x: torch.relu(x).nan_to_num(posinf=3e38))
    model, x = Scaled(), torch.full(SIZE, math.inf)
    session = open_session("recompute-all", tolerance=0.5)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING, "vdnn"):
        assert_same_as_plain(session, step, model)
    assert "by relu" in caplog.text
    assert "does not give the original within the tolerance of 0.5 (difference: inf of" in caplog.text


def difference(original: torch.Tensor, made: torch.Tensor) -> float:
    flat = [bytes_of(one.untyped_storage(), 0, one.nbytes) for one in (original, made)]
    return difference_between(flat[0], flat[1], original.dtype)


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    place=st.integers(0, 39),
    share=st.floats(2**-20, 2**-3),
)
def test_the_difference_is_that_of_the_furthest_over_the_largest(values: list[float], place: int, share: float) -> None:
    original = torch.tensor(values, dtype=torch.float64)
    made = original.clone()
    largest = float(original.abs().max())
    made[place % len(values)] += share * largest
    expected = float((made - original).abs().max()) / largest if largest else 0.0
    assert difference(original, made) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_of_every_kind_of_numbers(dtype: torch.dtype) -> None:
    original = torch.tensor([0.0, 1.0, -8.0, math.nan, math.inf, -math.inf], dtype=dtype)
    made = original.clone()
    made[0] = -made[0]
    assert difference(original, made) == 0
    made[1] = 1.5
    assert difference(original, made) == 1 / 16
    for place in (3, 4, 5):
        wrong = original.clone()
        wrong[place] = 7
        assert difference(original, wrong) == math.inf
    wrong = original.clone()
    wrong[2] = math.nan
    assert difference(original, wrong) == math.inf


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_always_exact(dtype: torch.dtype) -> None:
    assert difference(torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)) == math.inf


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tolerance": -1e-6}, ValueError, "tolerance: expected a share .* from 0 to below 1, got -1e-06"),
        ({"tolerance": math.nan}, ValueError, "tolerance: expected a share .* got nan"),
        ({"tolerance": 1}, ValueError, "tolerance: expected a share .* got 1"),
        ({"tolerance": math.inf}, ValueError, "tolerance: expected a share .* got inf"),
        ({"tolerance": True}, TypeError, "tolerance: expected a number such as 1e-6, or None .* got True"),
        ({"tolerance": "1e-6"}, TypeError, "tolerance: expected a number .* got '1e-6'"),
        ({"tolerance": 1e-6, "recompute": False}, ValueError, "tolerance: recompute=False recomputes nothing"),
        ({"tolerance": 1e-6, "policy": "vdnn-all"}, ValueError, "tolerance: this session recomputes nothing. Give"),
    ],
)
def test_bad_input(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        vdnn.offload(**{"device": "sim", "policy": "recompute-all", **options})
