"""U-Net on 572 x 572 grey images, two classes for each of the inner 388 x 388 pixels.

Ronneberger and others 2015: convolutions without padding, so the maps of skip connections are cropped. These maps live
from the way down to the way up, the longest lifetimes of any convolutional network. Every ReLU is in place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.workload import CrossEntropy, Workload

SIDE = 572
OUTPUT_SIDE = 388
CLASSES = 2
WIDTHS = (64, 128, 256, 512, 1024)


class TwoConvolutions(nn.Sequential):
    """Two convolutions without padding: each removes a pixel at every edge."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3),
            nn.ReLU(inplace=True),
        )


def down_and_up(network: Any, x: Tensor) -> Tensor:
    """Run a U-Net's levels, in 2 or 3 dimensions. Each level up also reads the middle of the map from the way down."""
    across = []
    for level in network.down[:-1]:
        across.append(level(x))
        x = network.pool(across[-1])
    x = network.down[-1](x)
    for widen, level in zip(network.widen, network.up, strict=True):
        x = widen(x)
        x = level(torch.cat([_middle(across.pop(), x), x], 1))
    return x


class UNet(nn.Module):
    """Down through `widths` and up again. At each level the way up also reads the map from the way down."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.down = nn.ModuleList(TwoConvolutions(inputs, width) for inputs, width in pairwise((1, *widths)))
        self.pool = nn.MaxPool2d(2)
        upward = tuple(reversed(widths))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(inputs, width, 2, 2) for inputs, width in pairwise(upward))
        self.up = nn.ModuleList(TwoConvolutions(inputs, width) for inputs, width in pairwise(upward))
        self.classifier = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(down_and_up(self, x))
        return out


def small_unet(batch: int) -> Workload:
    """A U-Net of two levels on 44 x 44 pixels, which classifies the inner 28 x 28."""
    loss = CrossEntropy(CLASSES, batch, 28, 28)
    return Workload(UNet((8, 16)), (torch.randn(batch, 1, 44, 44),), loss)


def unet(batch: int) -> Workload:
    loss = CrossEntropy(CLASSES, batch, OUTPUT_SIDE, OUTPUT_SIDE)
    return Workload(UNet(), (torch.randn(batch, 1, SIDE, SIDE),), loss)


def _middle(x: Tensor, like: Tensor) -> Tensor:
    """The middle of `x`, with the size of `like`."""
    for dimension in range(2, x.dim()):
        length = like.shape[dimension]
        x = x.narrow(dimension, (x.shape[dimension] - length) // 2, length)
    return x
