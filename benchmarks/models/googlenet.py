"""GoogLeNet, the first Inception network, on 224 x 224 images.

Szegedy and others 2014, as in convnet-benchmarks, which vDNN's evaluation follows: no local response normalization, no
auxiliary classifiers, no dropout, and a ReLU also after the last layer. Every ReLU is in place. torch.cat copies the
four branches, whereas vDNN's framework lets them write into one map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload


class Branches(NamedTuple):
    """The channels of one module: 1x1; 3x3 with its reduction; 5x5 with its reduction; after the pooling."""

    one: int
    reduce_three: int
    three: int
    reduce_five: int
    five: int
    pooled: int

    @property
    def outputs(self) -> int:
        return self.one + self.three + self.five + self.pooled


# The modules 3a to 5b. The side is halved after 3b and 4e.
MODULES = (
    Branches(64, 96, 128, 16, 32, 32),
    Branches(128, 128, 192, 32, 96, 64),
    Branches(192, 96, 208, 16, 48, 64),
    Branches(160, 112, 224, 24, 64, 64),
    Branches(128, 128, 256, 24, 64, 64),
    Branches(112, 144, 288, 32, 64, 64),
    Branches(256, 160, 320, 32, 128, 128),
    Branches(256, 160, 320, 32, 128, 128),
    Branches(384, 192, 384, 48, 128, 128),
)
POOLED_AFTER = (1, 6)


class Inception(nn.Module):
    """Four branches on the same input, concatenated in the output."""

    def __init__(self, inputs: int, branches: Branches) -> None:
        super().__init__()
        self.one = _convolution(inputs, branches.one, 1)
        self.three = nn.Sequential(
            *_convolution(inputs, branches.reduce_three, 1), *_convolution(branches.reduce_three, branches.three, 3)
        )
        self.five = nn.Sequential(
            *_convolution(inputs, branches.reduce_five, 1), *_convolution(branches.reduce_five, branches.five, 5)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), *_convolution(inputs, branches.pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def googlenet(batch: int, modules: Sequence[Branches] = MODULES) -> Workload:
    """GoogLeNet, or with fewer `modules` a smaller network of the same architecture."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3),  # to 112 x 112
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),  # to 56 x 56
        *_convolution(64, 64, 1),
        *_convolution(64, 192, 3),
        nn.MaxPool2d(3, 2, 1),  # to 28 x 28
    ]
    inputs = 192
    for index, branches in enumerate(modules):
        layers.append(Inception(inputs, branches))
        inputs = branches.outputs
        if index in POOLED_AFTER:
            layers.append(nn.MaxPool2d(3, 2, 1))
    # The whole network ends with maps of 7 x 7.
    pooling = nn.AvgPool2d(7, 1) if modules is MODULES else nn.AdaptiveAvgPool2d(1)
    layers += [pooling, nn.Flatten(), nn.Linear(inputs, IMAGENET_CLASSES), nn.ReLU(inplace=True)]
    return image_workload(nn.Sequential(*layers), batch, 224)


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """A convolution that keeps the side, and a ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU(inplace=True))
