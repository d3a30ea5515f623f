"""3D U-Net on volumes of 132 x 132 x 116 voxels with three channels: three classes for the inner 44 x 44 x 28.

Cicek and others 2016: convolutions without padding, a batch norm before each ReLU, channels doubled before a pooling
and never halved by an up-convolution. Norms have no parameters and up-convolutions have no bias, which gives the
published 19,069,955 parameters. Every ReLU is in place.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.models.unet import down_and_up
from benchmarks.models.workload import CrossEntropy, Workload

CHANNELS = 3
CLASSES = 3
SIDES = (132, 132, 116)
OUTPUT_SIDES = (44, 44, 28)
WIDTHS = (64, 128, 256, 512)  # the output channels of each level


class TwoConvolutions3d(nn.Sequential):
    """Two convolutions without padding: each removes a voxel at every face."""

    def __init__(self, inputs: int, between: int, outputs: int) -> None:
        super().__init__(
            nn.Conv3d(inputs, between, 3),
            nn.BatchNorm3d(between, affine=False),
            nn.ReLU(inplace=True),
            nn.Conv3d(between, outputs, 3),
            nn.BatchNorm3d(outputs, affine=False),
            nn.ReLU(inplace=True),
        )


class UNet3d(nn.Module):
    """Down through `widths` and up again. At each level the way up also reads the map from the way down."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        inputs = (CHANNELS, *widths)
        self.down = nn.ModuleList(
            TwoConvolutions3d(inputs[level], width // 2 if not level else inputs[level], width)
            for level, width in enumerate(widths)
        )
        self.pool = nn.MaxPool3d(2)
        upward = tuple(reversed(widths))
        self.widen = nn.ModuleList(nn.ConvTranspose3d(width, width, 2, 2, bias=False) for width in upward[:-1])
        self.up = nn.ModuleList(TwoConvolutions3d(below + beside, beside, beside) for below, beside in pairwise(upward))
        self.classifier = nn.Conv3d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(down_and_up(self, x))
        return out


def unet3d(batch: int) -> Workload:
    return _unet3d(batch, WIDTHS, SIDES, OUTPUT_SIDES)


def small_unet3d(batch: int) -> Workload:
    """A 3D U-Net of two levels on 20 x 20 x 20 voxels, which classifies the inner 4 x 4 x 4."""
    return _unet3d(batch, (8, 16), (20, 20, 20), (4, 4, 4))


def _unet3d(batch: int, widths: tuple[int, ...], sides: tuple[int, ...], output_sides: tuple[int, ...]) -> Workload:
    volume = torch.randn(batch, CHANNELS, *sides)
    return Workload(UNet3d(widths), (volume,), CrossEntropy(CLASSES, batch, *output_sides))
