"""Lives of graphs: backwards in any number, order and part, interleaved graphs, and graphs that die early.

A life takes models and an input, and returns what is compared beside gradients and buffers. Sessions on every device
without a GPU run all of them, and so does the deferred accelerator.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.runtime.rigs.networks import conv_chain, images, perceptron, small_resnet

Tensor = torch.Tensor


class Life(NamedTuple):
    step: Callable[..., Sequence[Tensor]]
    models: tuple[Callable[[], nn.Module], ...]
    make_input: Callable[[], Tensor]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def one_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = loss_of(model, x)
    loss.backward()
    return [loss]


def backward_twice(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def double_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    loss = loss_of(model, leaf)
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    penalty = slope.square().sum()
    penalty.backward()
    return [loss, slope, penalty]


def third_derivatives(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    value = (model(leaf).sin() * leaf.exp()).sum()
    slopes = []
    for _ in range(3):
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
        slopes.append(slope)
        value = (slope * leaf).sum()
    value.backward()
    return slopes


def a_part_and_then_the_rest(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = [one for one in model.parameters() if one.dim() == 2]
    loss = loss_of(model, x)
    late = torch.autograd.grad(loss, weights[-1:], retain_graph=True)
    early = torch.autograd.grad(loss, weights[:1], retain_graph=True)
    loss.backward()
    return [*late, *early]


def a_branch_without_a_backward(trunk: nn.Module, used: nn.Module, unused: nn.Module, x: Tensor) -> list[Tensor]:
    hidden = trunk(x)
    aside = loss_of(unused, hidden.exp())
    loss = loss_of(used, hidden)
    loss.backward()
    return [loss, aside]


def two_forwards_then_two_backwards(model: nn.Module, x: Tensor) -> list[Tensor]:
    losses = [loss_of(model, batch) for batch in (x, x * 2)]
    for loss in losses:
        loss.backward()
    return losses


def one_forward_one_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """At depth four."""
    waiting: deque[Tensor] = deque()
    done = []
    for number in range(9):
        waiting.append(loss_of(model, x + number))
        if len(waiting) == 4:
            done.append(waiting.popleft())
            done[-1].backward()
    while waiting:
        done.append(waiting.popleft())
        done[-1].backward()
    return done


def accumulation_over_steps_of_the_optimizer(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for index in range(6):
        losses.append(model(x + index).square().mean())
        losses[-1].backward()
        if index % 3 == 2:
            optimizer.step()
            if index < 5:
                optimizer.zero_grad()
    return [*losses, *(weight.detach().clone() for weight in model.parameters())]


def two_models_interleaved(left: nn.Module, right: nn.Module, x: Tensor) -> list[Tensor]:
    first, second = loss_of(left, x), loss_of(right, x)
    first.backward()
    third = left(x).exp().sum()
    second.backward()
    third.backward()
    return [first, second, third]


def one_model_feeds_another(generator: nn.Module, judge: nn.Module, noise: Tensor) -> list[Tensor]:
    """As in a GAN."""
    made = generator(noise)
    judged = loss_of(judge, made.detach())
    judged.backward()
    fooled = judge(made).sum()
    fooled.backward()
    return [judged, fooled]


class ReadsThrice(torch.autograd.Function):
    """Reads ctx.saved_tensors three times: each time unpacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return gradient * y, gradient * (x + again) / 2


def saves_that_are_read_thrice(model: nn.Module, x: Tensor) -> list[Tensor]:
    hidden = model(x)
    loss = ReadsThrice.apply(hidden.sin(), hidden.cos()).sum()
    loss.backward()
    return [loss]


def written_in_place(model: Any, x: Tensor) -> list[Tensor]:
    hidden = model[0](x)
    hidden.mul_(2).relu_()
    loss = loss_of(model[1:], hidden)
    loss.backward()
    return [loss]


def _stop(gradient: Tensor) -> None:
    raise RuntimeError("enough")


def stopped_and_repeated(model: Any, x: Tensor) -> list[Tensor]:
    hidden = model[:3](x)
    hidden.register_hook(_stop)
    with contextlib.suppress(RuntimeError):
        loss_of(model[3:], hidden).backward()
    model.zero_grad()
    return one_backward(model, x)


def vectors() -> Tensor:
    return torch.randn(4, 16)


def _lives_of(*steps: Callable[..., Sequence[Tensor]]) -> dict[str, Life]:
    """Over linear layers, and over convolutions."""
    linear = {f"{step.__name__}-linear": Life(step, (lambda: perceptron(depth=3),), vectors) for step in steps}
    return linear | {f"{step.__name__}-conv": Life(step, (conv_chain,), images) for step in steps}


LIVES: dict[str, Life] = {
    **_lives_of(
        one_backward,
        backward_twice,
        double_backward,
        two_forwards_then_two_backwards,
        one_forward_one_backward,
        accumulation_over_steps_of_the_optimizer,
        saves_that_are_read_thrice,
        written_in_place,
        stopped_and_repeated,
    ),
    "two_forwards_then_two_backwards-residual": Life(two_forwards_then_two_backwards, (small_resnet,), images),
    "third_derivatives": Life(third_derivatives, (perceptron,), vectors),
    "a_part_and_then_the_rest": Life(a_part_and_then_the_rest, (perceptron,), vectors),
    "a_branch_without_a_backward": Life(a_branch_without_a_backward, (perceptron,) * 3, vectors),
    "two_models_interleaved": Life(two_models_interleaved, (conv_chain, small_resnet), images),
    "one_model_feeds_another": Life(one_model_feeds_another, (perceptron,) * 2, vectors),
}
