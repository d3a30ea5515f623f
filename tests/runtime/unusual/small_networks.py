"""Small networks for unusual training loops, and their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from tests.runtime.unusual.every_mode import Step

WIDTH, BATCH = 16, 64


def deep(inputs: int = WIDTH, outputs: int = WIDTH, depth: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, WIDTH), nn.Tanh()]
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def convolutional(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, outputs, 3, padding=1), nn.Tanh(),
    )  # fmt: skip


def values_of(*modules: nn.Module) -> list[torch.Tensor]:
    return [one for module in modules for one in module.state_dict().values()]


def adversaries(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(module.parameters(), lr=1e-3, betas=(0.5, 0.999)) for module in modules]


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def steps_on(
    loss_of: Callable[[int], torch.Tensor],
    *trained: nn.Module | torch.Tensor,
    lr: float = 0.05,
    is_seeded: bool = False,
    steps: bool = True,
) -> Step:
    """Steps of SGD that return the loss, the gradients and the parameters; without `steps`, only the gradients are
    new. With `is_seeded`, the random numbers of a step depend on its number alone."""
    parameters = [one for each in trained for one in ([each] if isinstance(each, torch.Tensor) else each.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def step(index: int) -> Iterable[torch.Tensor | None]:
        if is_seeded:
            torch.manual_seed(index)
        optimizer.zero_grad()
        loss = loss_of(index)
        loss.backward()
        if steps:
            optimizer.step()
        return [loss, *(one.grad for one in parameters), *parameters]

    return step
