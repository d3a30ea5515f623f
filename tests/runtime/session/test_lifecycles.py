"""Lifecycles of graphs: backwards in any number, order and part, interleaved graphs, and graphs that die early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.networks import conv_chain, images, perceptron, small_resnet
from tests.runtime.rigs.side_by_side import (
    assert_nothing_alive,
    assert_same_as_plain,
    same_bits,
)
from vdnn.runtime.session.session import Session

pytestmark = EITHER_WAY


def test_a_step_is_the_same_as_plain(session: Session) -> None:
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)


def test_a_retained_graph_goes_backward_twice(session: Session) -> None:
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)


def test_a_graph_goes_backward_five_times_after_the_session_was_left(session: Session) -> None:
    model, x = small_resnet(), images()

    def gradients(loss: torch.Tensor) -> list[torch.Tensor | None]:
        for _ in range(5):
            loss.backward(retain_graph=True)
        return [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]

    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = gradients(model(x).square().sum())
    model.zero_grad()
    model.load_state_dict(state)
    with session:
        loss = model(x).square().sum()
    assert all(map(same_bits, plain, gradients(loss)))
    del loss
    assert_nothing_alive(session)


@pytest.mark.parametrize("make", [perceptron, lambda: conv_chain()[:6]], ids=["linear", "conv"])
def test_double_backward(session: Session, make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(4, 16) if isinstance(model[0], nn.Linear) else images()  # type: ignore[index]
    x.requires_grad_()

    def step() -> list[torch.Tensor]:
        loss = model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = slope.square().sum()
        penalty.backward()
        return [loss, slope, penalty]

    assert_same_as_plain(session, step, model, x)


def test_third_derivatives(session: Session) -> None:
    x = torch.randn(8, requires_grad=True)

    def step() -> list[torch.Tensor]:
        value = (x.sin() * x.exp()).sum()
        slopes = []
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            slopes.append(slope)
            value = (slope * x).sum()
        value.backward()
        return slopes

    assert_same_as_plain(session, step, x)


def test_gradients_of_part_of_the_graph_then_of_the_rest(session: Session) -> None:
    model, x = perceptron(depth=4), torch.randn(4, 16)
    last, first = model[6].weight, model[0].weight

    def step() -> list[torch.Tensor]:
        loss = model(x).square().sum()
        late = torch.autograd.grad(loss, [last], retain_graph=True)
        early = torch.autograd.grad(loss, [first], retain_graph=True)
        loss.backward()
        return [*late, *early]

    assert_same_as_plain(session, step, model)


def test_a_branch_without_a_backward_is_freed_with_its_graph(session: Session) -> None:
    trunk, used, unused = perceptron(), perceptron(), perceptron()
    x = torch.randn(4, 16)

    def step() -> torch.Tensor:
        hidden = trunk(x)
        aside = unused(hidden).sum()
        loss = used(hidden).sum()
        loss.backward()
        return aside

    assert_same_as_plain(session, step, trunk, used, unused)


def test_two_forwards_then_two_backwards(session: Session) -> None:
    model, batches = small_resnet(), [images(), images()]

    def step() -> list[torch.Tensor]:
        losses = [model(batch).square().sum() for batch in batches]
        for loss in losses:
            loss.backward()
        return losses

    assert_same_as_plain(session, step, model)


def test_one_forward_one_backward_at_depth_four(session: Session) -> None:
    model, batches = conv_chain(), [images() for _ in range(9)]

    def step() -> list[torch.Tensor]:
        waiting: deque[torch.Tensor] = deque()
        done = []
        for batch in batches:
            waiting.append(model(batch).square().sum())
            if len(waiting) == 4:
                done.append(waiting.popleft())
                done[-1].backward()
        while waiting:
            done.append(waiting.popleft())
            done[-1].backward()
        return done

    assert_same_as_plain(session, step, model)


def test_gradients_accumulate_over_steps_of_the_optimizer(session: Session) -> None:
    model, batches = conv_chain(), [images() for _ in range(6)]

    def step() -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for index, batch in enumerate(batches):
            losses.append(model(batch).square().mean())
            losses[-1].backward()
            if index % 3 == 2:
                optimizer.step()
                if index < 5:
                    optimizer.zero_grad()
        return [*losses, *(weight.detach().clone() for weight in model.parameters())]

    assert_same_as_plain(session, step, model)


def test_two_models_interleaved(session: Session) -> None:
    left, right, x = conv_chain(), small_resnet(), images()

    def step() -> list[torch.Tensor]:
        first = left(x).square().sum()
        second = right(x).square().sum()
        first.backward()
        third = left(x).exp().sum()
        second.backward()
        third.backward()
        return [first, second, third]

    assert_same_as_plain(session, step, left, right)


def test_one_model_feeds_another_as_a_gan_does(session: Session) -> None:
    generator, judge, noise = perceptron(), perceptron(), torch.randn(4, 16)

    def step() -> list[torch.Tensor]:
        made = generator(noise)
        judged = judge(made.detach()).square().sum()
        judged.backward()
        fooled = judge(made).sum()
        fooled.backward()
        return [judged, fooled]

    assert_same_as_plain(session, step, generator, judge)


class ReadsThrice(torch.autograd.Function):
    """Reads ctx.saved_tensors three times: each time unpacks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        assert torch.equal(x, again)
        return gradient * y, gradient * x


def test_saved_tensors_are_read_any_number_of_times(session: Session) -> None:
    x = torch.randn(64, requires_grad=True)

    def step() -> torch.Tensor:
        loss = ReadsThrice.apply(x.sin(), x.cos()).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, x)


@pytest.mark.parametrize("blocks", [0, 2, 4, 5, 8])
def test_a_graph_dropped_amid_its_copies_takes_them_with_it(open_session: OpenSession, blocks: int) -> None:
    session = open_session(offload_window="1MiB", reload_window="1MiB")
    model, x = small_resnet(), images(4)
    with session:
        hidden = model[:blocks](x)
        loss = model[blocks:](hidden).square().sum()
        if hidden.requires_grad:
            # Some saves from before `hidden` are being reloaded when the backward stops.
            hidden.register_hook(_stop)
            with pytest.raises(RuntimeError, match="enough"):
                loss.backward()
        del hidden, loss
    assert_nothing_alive(session)
    model.zero_grad()

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)


def _stop(gradient: torch.Tensor) -> None:
    raise RuntimeError("enough")
