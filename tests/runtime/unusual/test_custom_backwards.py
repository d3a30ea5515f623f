"""Custom backwards that overwrite what they unpacked: other readers get the values of plain PyTorch, or its error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_error_in, assert_same_in
from tests.runtime.unusual.small_networks import steps_on

pytestmark = pytest.mark.slow

Tensor = torch.Tensor


class Overwrites(torch.autograd.Function):
    """Squares its input. The backward overwrites what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grads[0])


class OverwritesUnseen(Overwrites):
    """Overwrites in a way that no version counter shows, as a kernel does that gets an address."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        written = x.data
        return written.mul_(2).mul_(grads[0])


class OverwritesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.exp()
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return made.mul_(grads[0])


class OverwritesTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_of_weight = (x * grads[0]).sum(0)
        return weight.data.mul_(grads[0].mean(0)).expand_as(x).clone(), grad_of_weight


class ReadsTwice(torch.autograd.Function):
    """Reads its save again after it has written to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        slope = ctx.saved_tensors[0].cos()
        ctx.saved_tensors[0].data.zero_()
        return slope * grads[0]


def beside_a_recipe(custom: Any) -> Step:
    """relu, exp and a norm's output are recomputed from the tensor that the custom function saved."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))

    def loss_of(index: int) -> Tensor:
        hidden = model[1](model[0](torch.randn(8, 16)))
        others = (hidden + 0).tanh().mul(hidden.relu().exp()).sin()
        return model[2](custom.apply(hidden * 1.5) + others.square()).square().mean()  # type: ignore[no-any-return]

    return steps_on(loss_of, model, is_seeded=True)


def of_one_value(custom: Any) -> Step:
    """A value is recomputed from the very tensor that the custom function overwrites, and is used after the write."""
    first, last = nn.Linear(16, 16), nn.Linear(16, 16)

    def loss_of(index: int) -> Tensor:
        hidden = first(torch.randn(8, 16))
        return (last(hidden.sigmoid().sin()) + 1).square().mean() + custom.apply(hidden).sum()  # type: ignore[no-any-return]

    return steps_on(loss_of, first, last, is_seeded=True, steps=False)


def overwritten_first(custom: Any) -> Step:
    """The custom function saves the value before sigmoid reads it. Its own backward runs first, and overwrites the
    value."""
    first, last = nn.Linear(16, 16), nn.Linear(16, 16)

    def loss_of(index: int) -> Tensor:
        hidden = first(torch.randn(8, 16)).sin()
        overwriting = custom.apply(hidden).sum()
        loss = last(hidden.sigmoid().exp()).square().mean()
        del hidden
        overwriting.backward(retain_graph=True)
        return loss  # type: ignore[no-any-return]

    return steps_on(loss_of, first, last, is_seeded=True, steps=False)


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("custom", [Overwrites, OverwritesUnseen, OverwritesItsOutput, ReadsTwice])
@pytest.mark.parametrize("program", [beside_a_recipe, of_one_value, overwritten_first])
def test_what_is_recomputed_is_not_made_of_what_a_custom_backward_overwrote(
    program: Callable[[Any], Step], custom: Any, mode: str
) -> None:
    assert_same_in(mode, partial(program, custom))


@pytest.mark.parametrize("mode", MODES)
def test_a_norm_is_not_recomputed_with_a_weight_that_a_custom_backward_overwrote(mode: str) -> None:
    def factory() -> Step:
        norm, last = nn.LayerNorm(16), nn.Linear(16, 16)

        def step(index: int) -> list[Tensor | None]:
            torch.manual_seed(index)
            with torch.no_grad():
                norm.weight.fill_(1 + index)
            x = torch.randn(8, 16, requires_grad=True)
            loss = last(norm(x)).square().mean() + OverwritesTheWeight.apply(x, norm.weight).sum()
            loss.backward()
            return [loss, x.grad, *(one.grad for one in last.parameters())]

        return step

    assert_same_in(mode, factory)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", [torch.sin, lambda x: x * x, Overwrites.apply])
def test_a_second_saver_raises_what_plain_torch_raises(other: Callable[[Tensor], Tensor], mode: str) -> None:
    """The custom function runs first in the backward."""

    def factory() -> Step:
        linear = nn.Linear(16, 16)

        def loss_of(index: int) -> Tensor:
            hidden = linear(torch.randn(8, 16))
            loss = other(hidden).sum()
            return loss + Overwrites.apply(hidden).sum()  # type: ignore[no-any-return]

        return steps_on(loss_of, linear, is_seeded=True, steps=False)

    assert_same_error_in(mode, factory, RuntimeError, "modified by an inplace operation")


class OverwritesOverlappingParts(torch.autograd.Function):
    """Saves a slice and a part of that slice. Its backward writes to one of them and reads the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part_first: bool, writes_to_part: bool) -> Tensor:
        parts = x.detach()[:64], x.detach()[16:32]
        ctx.save_for_backward(*(reversed(parts) if part_first else parts))
        ctx.how = part_first, writes_to_part
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        part_first, writes_to_part = ctx.how
        slice_, part = reversed(ctx.saved_tensors) if part_first else ctx.saved_tensors
        written, read = (part, slice_) if writes_to_part else (slice_, part)
        written.mul_(3)
        return grads[0] * read.sum(), None, None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part_first", [False, True])
@pytest.mark.parametrize("writes_to_part", [False, True])
def test_overlapping_parts_of_a_storage_share_their_memory(mode: str, part_first: bool, writes_to_part: bool) -> None:
    """Each part is less than half of the storage, which is therefore not moved as a whole."""

    def factory() -> Step:
        linear = nn.Linear(16, 16)

        def loss_of(index: int) -> Tensor:
            hidden = linear(torch.randn(256, 16))
            return OverwritesOverlappingParts.apply(hidden * 2, part_first, writes_to_part).exp().sin().sum()  # type: ignore[no-any-return]

        return steps_on(loss_of, linear, is_seeded=True, steps=False)

    assert_same_in(mode, factory)


class AddsToItsWeight(torch.autograd.Function):
    """Adds to the gradient of its weight by itself. The weight is that of the context, or the one that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, takes_saved: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = None if takes_saved else weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, saved = ctx.saved_tensors
        weight = saved if ctx.weight is None else ctx.weight
        added = x.t() @ grads[0]
        weight.grad = added if weight.grad is None else weight.grad.add_(added)
        return grads[0] @ saved.t(), None, None


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_adds_to_the_gradient_of_a_weight_that_its_context_has(mode: str) -> None:
    def factory() -> Step:
        weight = nn.Parameter(torch.randn(16, 16))
        return steps_on(lambda _: AddsToItsWeight.apply(torch.randn(8, 16), weight, False).sin().sum(), weight)

    assert_same_in(mode, factory)


def test_what_it_adds_to_a_weight_that_it_saved_is_lost_under_hooks_of_torch_too() -> None:
    """If torch keeps it one day, the page on troubleshooting has to say so."""
    weight = nn.Parameter(torch.randn(16, 16))
    with torch.autograd.graph.save_on_cpu():
        out = AddsToItsWeight.apply(torch.randn(8, 16), weight, True)
    out.sum().backward()
    assert weight.grad is None
