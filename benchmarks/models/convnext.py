"""ConvNeXt-T on 224 x 224 images.

Liu and others 2022: stages of 3, 3, 9 and 3 blocks of 96, 192, 384 and 768 channels. A block is a depthwise convolution
of 7 x 7, a layer norm over channels, and a perceptron on channels-last tensors, scaled and added to its input. There is
no stochastic depth.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

SIDE = 224
BLOCKS = (3, 3, 9, 3)
CHANNELS = 96
EPSILON = 1e-6
SCALE = 1e-6


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution and a perceptron, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(channels, eps=EPSILON),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        )
        self.scale = nn.Parameter(torch.full((channels, 1, 1), SCALE))

    def forward(self, x: Tensor) -> Tensor:
        made = self.perceptron(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: Tensor = x + self.scale * made
        return out


def convnext_tiny(batch: int) -> Workload:
    return convnext(batch)


def convnext(batch: int, channels: int = CHANNELS, blocks: tuple[int, ...] = BLOCKS, side: int = SIDE) -> Workload:
    """A ConvNeXt of any width. Each stage halves the side and doubles the channels of the previous one."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, 4), ChannelNorm(channels, eps=EPSILON)]
    for stage, count in enumerate(blocks):
        width = channels * 2**stage
        if stage:
            layers += [ChannelNorm(width // 2, eps=EPSILON), nn.Conv2d(width // 2, width, 2, 2)]
        layers += [Block(width) for _ in range(count)]
    layers += [
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(width, eps=EPSILON),
        nn.Linear(width, IMAGENET_CLASSES),
    ]
    return image_workload(nn.Sequential(*layers), batch, side)
