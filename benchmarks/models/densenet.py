"""DenseNet-121 and DenseNet-201 on 224 x 224 images: each layer reads what all before it in its block made.

Huang and others 2016, the variant with bottlenecks and compression, as torchvision has it. Every ReLU is in place,
behind a batch norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

GROWTH = 32
BOTTLENECK = 4
BLOCKS = (6, 12, 24, 16)
BLOCKS_201 = (6, 12, 48, 32)
SIDE = 224
STEM = 64


class DenseLayer(nn.Module):
    """Adds GROWTH channels, made from all that are there."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        width = BOTTLENECK * GROWTH
        self.new = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, made: list[Tensor]) -> Tensor:
        out: Tensor = self.new(torch.cat(made, 1))
        return out


class DenseBlock(nn.Module):
    """Layers that each see the block's input and all layers before."""

    def __init__(self, inputs: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + place * GROWTH) for place in range(count))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(made))
        return torch.cat(made, 1)


def densenet121(batch: int) -> Workload:
    return densenet(batch, BLOCKS)


def densenet201(batch: int) -> Workload:
    return densenet(batch, BLOCKS_201)


def densenet(batch: int, blocks: tuple[int, ...], side: int = SIDE) -> Workload:
    """`blocks` layers in each block; all but the last halve the channels and the side behind them."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, STEM, 7, 2, 3, bias=False),
        nn.BatchNorm2d(STEM),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = STEM
    for place, count in enumerate(blocks):
        if place:
            layers += _transition(channels)
            channels //= 2
        layers.append(DenseBlock(channels, count))
        channels += count * GROWTH
    layers += [
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, IMAGENET_CLASSES),
    ]
    return image_workload(nn.Sequential(*layers), batch, side)


def _transition(channels: int) -> list[nn.Module]:
    """Halves the channels and the side."""
    return [
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    ]
