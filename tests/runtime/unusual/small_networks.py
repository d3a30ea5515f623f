"""Small networks for unusual training loops, and their optimizers."""

from __future__ import annotations

import torch
from torch import nn

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
