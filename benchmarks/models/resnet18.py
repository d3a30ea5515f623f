"""ResNet-18 and ResNet-34 on 224 x 224 images: two 3x3 convolutions around each shortcut.

He and others 2015, as in torchvision. Every ReLU is in place.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.resnet import SIDE, Residual
from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

BLOCKS_18 = (2, 2, 2, 2)  # in each stage
BLOCKS_34 = (3, 4, 6, 3)


class BasicBlock(Residual):
    """A residual of two 3x3 convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        stride = 1 if inputs == outputs else 2
        residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        super().__init__(residual, inputs, outputs, stride)


def resnet18(batch: int, side: int = SIDE) -> Workload:
    return _resnet(batch, BLOCKS_18, side)


def resnet34(batch: int) -> Workload:
    return _resnet(batch, BLOCKS_34, SIDE)


def _resnet(batch: int, blocks: tuple[int, ...], side: int) -> Workload:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate(blocks):
        outputs = 64 * 2**stage
        for _ in range(count):
            layers.append(BasicBlock(inputs, outputs))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, IMAGENET_CLASSES)]
    return image_workload(nn.Sequential(*layers), batch, side)
