"""Training loops whose optimizers step within the backward: factories for every_mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.unusual.every_mode import Factory, Step
from tests.runtime.unusual.small_networks import BATCH, WIDTH, convolutional, deep, values_of


def step_in_backward(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Gives each parameter an optimizer that steps as soon as its gradient is ready, as in torch's tutorial."""

    def hook_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(make([parameter], lr=1e-3)))


def one_for_each_parameter(make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> Factory:
    def factory() -> Step:
        model = deep()
        step_in_backward(model, make)

        def step(_: int) -> Iterable[torch.Tensor]:
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            loss.backward()
            return [loss, *values_of(model)]

        return step

    return factory


def one_for_each_parameter_of_a_convolution() -> Step:
    model = convolutional(3, 3)
    step_in_backward(model, torch.optim.SGD)

    def step(_: int) -> Iterable[torch.Tensor]:
        loss = (model(torch.randn(4, 3, 8, 8)) - 1).square().sum()
        loss.backward()
        return [loss, *values_of(model)]

    return step


def in_backward_beside_one_behind_it() -> Step:
    """One optimizer for the embeddings steps after the backward; those of the other parameters step within it."""
    embedding, model = nn.Embedding(40, WIDTH), deep()
    behind = torch.optim.Adam(embedding.parameters(), lr=1e-3)
    step_in_backward(model, torch.optim.SGD)

    def step(_: int) -> Iterable[torch.Tensor]:
        loss = model(embedding(torch.randint(40, (BATCH,)))).square().mean()
        loss.backward()
        behind.step()
        behind.zero_grad()
        return [loss, *values_of(embedding, model)]

    return step


def in_backward_with_checkpoints() -> Step:
    """Between the blocks of this backward no graph holds anything."""
    blocks = nn.ModuleList(deep(depth=1) for _ in range(4))
    step_in_backward(blocks, torch.optim.SGD)

    def step(_: int) -> Iterable[torch.Tensor]:
        x = torch.randn(BATCH, WIDTH)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = x.square().mean()
        loss.backward()
        return [loss, *values_of(blocks)]

    return step


def in_backward_of_several_losses() -> Step:
    """Several losses, each of its own part of the model."""
    models = nn.ModuleList(deep() for _ in range(3))
    step_in_backward(models, torch.optim.SGD)

    def step(_: int) -> Iterable[torch.Tensor]:
        x = torch.randn(BATCH, WIDTH)
        losses = [model(x).square().mean() for model in models]
        for loss in losses:
            loss.backward()
        return [*losses, *values_of(models)]

    return step


def in_backward_with_accumulation() -> Step:
    """The optimizers step in every third backward."""
    model = deep()
    turn = 0
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-2)

        def hook(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            if turn == 2:
                optimizer.step()
                optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)

    def step(_: int) -> Iterable[torch.Tensor]:
        nonlocal turn
        losses = []
        for turn in range(3):  # noqa: B007 (the hooks read it)
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            loss.backward()
            losses.append(loss)
        return [*losses, *values_of(model)]

    return step


IN_BACKWARD: dict[str, Factory] = {
    "one for each parameter, Adam": one_for_each_parameter(),
    "one for each parameter, SGD": one_for_each_parameter(torch.optim.SGD),
    "of a convolution": one_for_each_parameter_of_a_convolution,
    "beside one behind it": in_backward_beside_one_behind_it,
    "with checkpoints": in_backward_with_checkpoints,
    "of several losses": in_backward_of_several_losses,
    "with accumulation": in_backward_with_accumulation,
}
