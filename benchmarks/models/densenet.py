"""DenseNet-121 and DenseNet-201 on 224 x 224 images: each layer reads the outputs of all earlier layers in its block.

Huang and others 2016, the variant with bottlenecks and compression, as in torchvision. Every ReLU is in place and
follows a batch norm.
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
    """Adds GROWTH channels, made from all channels so far."""

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
    """Layers that each read the block's input and the outputs of all earlier layers."""

    def __init__(self, inputs: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + index * GROWTH) for index in range(count))

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
    """A DenseNet with `blocks` layers in each block. Transitions between blocks halve the channels and the side."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, STEM, 7, 2, 3, bias=False),
        nn.BatchNorm2d(STEM),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = STEM
    for index, count in enumerate(blocks):
        if index:
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
    """Layers that halve the channels and the side."""
    return [
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    ]
