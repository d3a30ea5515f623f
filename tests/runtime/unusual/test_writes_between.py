"""Writes to operands of a recipe between forward and backward, in ways that no version counter shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.unusual.every_mode import MODES, PLAN_MODES, Step, assert_same_in, run_in
from tests.runtime.unusual.small_networks import steps_on
from vdnn.errors import RecomputeError, VdnnError
from vdnn.runtime.machine.virtual_machine import VirtualMachine

Tensor = torch.Tensor
Write = Callable[[nn.Sequential], None]


def _model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)
    )


def program(write: Write, *, first_step: int = 0) -> Callable[[], Step]:
    """Writes between the forward and backward of every step, from `first_step` on."""

    def factory() -> Step:
        model = _model()

        def loss_of(index: int) -> Tensor:
            loss = (model(torch.randn(8, 16)).exp().sin() + 1).square().mean()
            if index >= first_step:
                write(model)
            return loss  # type: ignore[no-any-return]

        return steps_on(loss_of, model, is_seeded=True)

    return factory


def add_to_a_bias(model: nn.Sequential) -> None:
    model[0].bias.data.add_(0.1)


def scale_a_norm(model: nn.Sequential) -> None:
    model[1].weight.data.mul_(1.5)


def shift_a_norm_through_numpy(model: nn.Sequential) -> None:
    model[3].bias.detach().numpy()[:] += 0.25


def move_a_weight(model: nn.Sequential) -> None:
    model[0].weight.data.neg_()


def give_other_memory(model: nn.Sequential) -> None:
    model[3].bias.data = model[3].bias.data + 1


WRITES = [add_to_a_bias, scale_a_norm, shift_a_norm_through_numpy, move_a_weight, give_other_memory]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_every_step_leaves_the_gradients_of_plain_torch(write: Write, mode: str) -> None:
    assert_same_in(mode, program(write))


@pytest.mark.parametrize("write", WRITES)
def test_a_policy_without_a_plan_reads_what_was_there_when_it_discarded(write: Write) -> None:
    assert_same_in("recompute-all", program(write, first_step=5))


@pytest.mark.parametrize("mode", PLAN_MODES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_comes_later_is_never_followed_by_a_wrong_number(write: Write, mode: str) -> None:
    """Every step is rechecked. It gives the bits of plain torch, or raises before the optimizer has used wrong
    gradients."""
    steps = 12
    torch.manual_seed(20)
    plain = program(write, first_step=6)
    session, ours = run_in(mode, plain, steps, recheck=1)
    reference = run_in("vdnn-all", plain, steps)[1]
    for left, right in zip(ours.steps, reference.steps, strict=False):
        assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True) if one is not None)
    if len(ours.steps) < steps:
        assert isinstance(ours.error, VdnnError), ours.error
    assert session.counters.saves


def test_an_operand_that_the_recorded_step_writes_to_has_no_recipe() -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        step = program(scale_a_norm)()
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as session:
            for index in range(4):
                step(index)
    names = [one.recompute.operation for one in session.recording.lifetimes if one.recompute is not None]
    assert names
    assert not any("batch_norm" in name for name in names), names


@pytest.mark.parametrize("mode", MODES)
def test_a_norm_that_is_stepped_by_hand_before_the_backward(mode: str) -> None:
    """A version counter shows this write, but plain PyTorch raises no error: it does not save the bias of a norm."""

    def write(model: nn.Sequential) -> None:
        with torch.no_grad():
            model[1].bias.add_(1)

    assert_same_in(mode, program(write))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["the input", "an activation", "both"])
def test_what_the_program_holds_is_written_behind_autograd(place: str, mode: str) -> None:
    """The program's own uses see the write, as in plain PyTorch. Values computed before the write must not change.
    Without a plan nothing shows it before a recheck, which raises."""

    def factory() -> Step:
        first, last = nn.Linear(16, 16), nn.Linear(16, 16)
        held: list[Tensor] = []  # by the program, in the backward

        def loss_of(index: int) -> Tensor:
            x = torch.randn(8, 16)
            hidden = first(x)
            active = hidden.tanh()
            loss = last(active.sigmoid().sin()).exp().mean() + (hidden * active).sum()
            if place != "an activation":
                x.data[:2].mul_(1.5)
            if place != "the input":
                active.data.add_(0.25)
            held[:] = [x, active]
            return loss  # type: ignore[no-any-return]

        return steps_on(loss_of, first, last, is_seeded=True, steps=False)

    with contextlib.suppress(RecomputeError) if mode == "recompute-all" else contextlib.nullcontext():
        assert_same_in(mode, factory)
