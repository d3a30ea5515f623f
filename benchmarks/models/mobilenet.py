"""MobileNetV2 on 224 x 224 images: inverted residuals, whose wide inner maps take most of its memory.

Sandler and others 2018, as in torchvision. Every ReLU6 is in place and follows a batch norm.
"""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

SIDE = 224
STEM = 32
LAST = 1280
DROPOUT = 0.2
# Expansion, channels, number of blocks, and the stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Widened by 1x1, filtered channel by channel, narrowed by 1x1, with a shortcut if the shape does not change."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        widened = [] if expansion == 1 else _convolution(inputs, width, 1)
        self.residual = nn.Sequential(
            *widened,
            *_convolution(width, width, 3, stride, groups=width),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        return x + out if self.has_shortcut else out


def mobilenet_v2(batch: int, side: int = SIDE) -> Workload:
    layers = _convolution(3, STEM, 3, 2)
    inputs = STEM
    for expansion, outputs, count, first_stride in STAGES:
        for index in range(count):
            layers.append(InvertedResidual(inputs, outputs, expansion, 1 if index else first_stride))
            inputs = outputs
    layers += _convolution(inputs, LAST, 1)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(LAST, IMAGENET_CLASSES)]
    return image_workload(nn.Sequential(*layers), batch, side)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    ]
