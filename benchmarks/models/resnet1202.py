"""ResNet-1202 on CIFAR-10's 32 x 32 images: 6 x 200 + 2 layers, 19.4 million parameters, very many small maps.

He and others 2015, section 4.2: three stages of 16, 32 and 64 channels, with two 3x3 convolutions in each block. If the
shape changes, the shortcut takes every second pixel and zeros for the new channels (option A), so it has no parameters.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import CrossEntropy, Workload, images

SIDE = 32
CLASSES = 10
WIDTHS = (16, 32, 64)
BLOCKS = 200  # in each stage


class PlainShortcutBlock(nn.Module):
    """Two 3x3 convolutions plus a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.added = outputs - inputs
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2 if self.added else 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        summed = self.residual(x)
        if self.added:
            half = self.added // 2
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, self.added - half))
        summed += x
        out: Tensor = self.relu(summed)
        return out


def resnet1202(batch: int) -> Workload:
    return cifar_resnet(batch, BLOCKS)


def cifar_resnet(batch: int, blocks: int) -> Workload:
    """A ResNet for CIFAR-10 with `blocks` in each stage: 6 x blocks + 2 layers."""
    inputs = WIDTHS[0]
    layers: list[nn.Module] = [nn.Conv2d(3, inputs, 3, 1, 1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
    for outputs in WIDTHS:
        for _ in range(blocks):
            layers.append(PlainShortcutBlock(inputs, outputs))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return Workload(nn.Sequential(*layers), (images(batch, SIDE),), CrossEntropy(CLASSES, batch))
