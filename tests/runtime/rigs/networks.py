"""Small networks with the shapes of well-known ones. They save, share and fork, and a step takes milliseconds."""

from __future__ import annotations

import torch
from torch import nn


def perceptron(width: int = 16, depth: int = 3) -> nn.Sequential:
    """Linear and tanh, `depth` times: tanh saves its output, which the next Linear saves again."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def conv_chain(channels: int = 4) -> nn.Sequential:
    """Convolution, batch norm, ReLU, pooling and a classifier, for images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 16, 5),
    )


def images(count: int = 2, size: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, size, size)


class Residual(nn.Module):
    """Two convolutions around a sum; a strided one projects its shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.first_norm(self.first(x)))
        outer: torch.Tensor = self.relu(self.second_norm(self.second(inner)) + self.shortcut(x))
        return outer


def small_resnet(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        Residual(channels, channels),
        Residual(channels, 2 * channels, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 5),
    )


class Dense(nn.Module):
    """Each layer reads the outputs of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * index, 2, 3, padding=1) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)).relu())
        return torch.cat(made, 1)


class Inception(nn.Module):
    """One input, four branches, one join."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 2, 1)
        self.three = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1).relu()


class UNet(nn.Module):
    """Skip connections join the first layers to the last: the lifetimes of the first maps span the whole step."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(16, 4, 2, 2)])
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x).relu()
        for layer in self.up:
            x = torch.cat([layer(x), skips.pop()], 1)
        out: torch.Tensor = self.last(x)
        return out


def small_vgg() -> nn.Sequential:
    """Pairs of convolutions between poolings, and a classifier with dropout; every ReLU in place."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (4, 8):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
        channels = width
    classifier = [nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 5)]
    return nn.Sequential(*layers, nn.Flatten(), *classifier)


def small_densenet() -> nn.Sequential:
    """Two dense blocks around a transition that halves the image."""
    return nn.Sequential(
        Dense(), nn.BatchNorm2d(11), nn.ReLU(), nn.Conv2d(11, 3, 1), nn.AvgPool2d(2), Dense(), nn.AdaptiveAvgPool2d(1)
    )


def small_googlenet() -> nn.Sequential:
    """Inception modules, each followed by a reduction to three channels."""
    return nn.Sequential(
        Inception(), nn.Conv2d(8, 3, 1), nn.LocalResponseNorm(3), Inception(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
