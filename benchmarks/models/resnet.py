"""ResNet-50, ResNet-101 and ResNet-152 on 224 x 224 images, and smaller networks of the same architecture.

He and others 2015, with the stride in the 3x3 convolution and every ReLU in place, as in torchvision and
fb.resnet.torch.
"""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

EXPANSION = 4
SIDE = 224
CHANNELS = 64


class Residual(nn.Module):
    """A residual plus a shortcut, which is projected if the shape changes."""

    def __init__(self, residual: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        summed = self.residual(x)
        summed += self.shortcut(x)
        out: Tensor = self.relu(summed)
        return out


class Bottleneck(Residual):
    """A residual of 1x1, 3x3 and 1x1 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        outputs = width * EXPANSION
        residual = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        super().__init__(residual, inputs, outputs, stride)


def resnet50(batch: int) -> Workload:
    return resnet(batch, (3, 4, 6, 3))


def resnet101(batch: int) -> Workload:
    return resnet(batch, (3, 4, 23, 3))


def resnet152(batch: int) -> Workload:
    return resnet(batch, (3, 8, 36, 3))


def resnet(batch: int, blocks: tuple[int, ...], side: int = SIDE, channels: int = CHANNELS) -> Workload:
    """A ResNet with `blocks` in each stage. Each stage halves the side and doubles the channels of the previous one."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, 2, 3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = channels
    for stage, count in enumerate(blocks):
        width = channels * 2**stage
        for index in range(count):
            layers.append(Bottleneck(inputs, width, stride=2 if stage and not index else 1))
            inputs = width * EXPANSION
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, IMAGENET_CLASSES)]
    return image_workload(nn.Sequential(*layers), batch, side)
