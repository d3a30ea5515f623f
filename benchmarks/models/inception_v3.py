"""Inception v3 on 299 x 299 images, with its auxiliary classifier.

Szegedy and others 2015, as in torchvision. The output is a pair, and the auxiliary loss has the weight 0.4 as in
torchvision's training. Every ReLU is in place and follows a batch norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.workload import IMAGENET_CLASSES, CrossEntropy, Workload

AUXILIARY_WEIGHT = 0.4
SIDE = 299


class Convolution(nn.Sequential):
    """Convolution, batch norm and ReLU. `kernel` may be a pair. By default the padding keeps the side."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | None = None
    ) -> None:
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        pads = (high // 2, wide // 2) if padding is None else (padding, padding)
        super().__init__(
            nn.Conv2d(inputs, outputs, (high, wide), stride, pads, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Beside(nn.Module):
    """Branches that run on the same input, with concatenated outputs."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class InceptionV3(nn.Module):
    """The network in three parts. The auxiliary classifier reads the output of the body, as the head does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Convolution(3, 32, 3, stride=2, padding=0),
            Convolution(32, 32, 3, padding=0),
            Convolution(32, 64, 3),
            nn.MaxPool2d(3, 2),
            Convolution(64, 80, 1),
            Convolution(80, 192, 3, padding=0),
            nn.MaxPool2d(3, 2),  # to 35 x 35
            _module_a(192, pooled=32),
            _module_a(256, pooled=64),
            _module_a(288, pooled=64),
            _reduction_b(288),  # to 17 x 17
            _module_c(768, width=128),
            _module_c(768, width=160),
            _module_c(768, width=160),
            _module_c(768, width=192),
        )
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3),
            Convolution(768, 128, 1),
            Convolution(128, 768, 5, padding=0),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(768, IMAGENET_CLASSES),
        )
        self.head = nn.Sequential(
            _reduction_d(768),  # to 8 x 8
            _module_e(1280),
            _module_e(2048),
            nn.AdaptiveAvgPool2d(1),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(2048, IMAGENET_CLASSES),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.head(x), self.auxiliary(x)


class BothLosses:
    """The classifier's cross entropy, plus the weighted one of the auxiliary classifier."""

    def __init__(self, batch: int) -> None:
        self.cross_entropy = CrossEntropy(IMAGENET_CLASSES, batch)

    def __call__(self, output: tuple[Tensor, Tensor]) -> Tensor:
        logits, auxiliary = output
        return self.cross_entropy(logits) + AUXILIARY_WEIGHT * self.cross_entropy(auxiliary)


def inception_v3(batch: int) -> Workload:
    return Workload(InceptionV3(), (torch.randn(batch, 3, SIDE, SIDE),), BothLosses(batch))


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Convolution(inputs, outputs, 1))


def _module_a(inputs: int, pooled: int) -> Beside:
    return Beside(
        Convolution(inputs, 64, 1),
        nn.Sequential(Convolution(inputs, 48, 1), Convolution(48, 64, 5)),
        nn.Sequential(Convolution(inputs, 64, 1), Convolution(64, 96, 3), Convolution(96, 96, 3)),
        _pooled(inputs, pooled),
    )


def _reduction_b(inputs: int) -> Beside:
    return Beside(
        Convolution(inputs, 384, 3, stride=2, padding=0),
        nn.Sequential(Convolution(inputs, 64, 1), Convolution(64, 96, 3), Convolution(96, 96, 3, 2, padding=0)),
        nn.MaxPool2d(3, 2),
    )


def _module_c(inputs: int, width: int) -> Beside:
    return Beside(
        Convolution(inputs, 192, 1),
        nn.Sequential(
            Convolution(inputs, width, 1), Convolution(width, width, (1, 7)), Convolution(width, 192, (7, 1))
        ),
        nn.Sequential(
            Convolution(inputs, width, 1),
            Convolution(width, width, (7, 1)),
            Convolution(width, width, (1, 7)),
            Convolution(width, width, (7, 1)),
            Convolution(width, 192, (1, 7)),
        ),
        _pooled(inputs, 192),
    )


def _reduction_d(inputs: int) -> Beside:
    return Beside(
        nn.Sequential(Convolution(inputs, 192, 1), Convolution(192, 320, 3, 2, padding=0)),
        nn.Sequential(
            Convolution(inputs, 192, 1),
            Convolution(192, 192, (1, 7)),
            Convolution(192, 192, (7, 1)),
            Convolution(192, 192, 3, 2, padding=0),
        ),
        nn.MaxPool2d(3, 2),
    )


def _module_e(inputs: int) -> Beside:
    return Beside(
        Convolution(inputs, 320, 1),
        nn.Sequential(Convolution(inputs, 384, 1), _fork(384)),
        nn.Sequential(Convolution(inputs, 448, 1), Convolution(448, 384, 3), _fork(384)),
        _pooled(inputs, 192),
    )


def _fork(channels: int) -> Beside:
    return Beside(Convolution(channels, channels, (1, 3)), Convolution(channels, channels, (3, 1)))
