"""Inception v4 on 299 x 299 images.

Szegedy and others 2016, as in Cadene's and timm's ports of the authors' TensorFlow code: no auxiliary classifier, and
dropout 0.2 before the last layer. Every ReLU is in place and follows a batch norm.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.inception_v3 import SIDE, Beside, Convolution
from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

MODULES = (4, 7, 3)  # numbers of the modules A, B and C
DROPOUT = 0.2


def inception_v4(batch: int, modules: tuple[int, int, int] = MODULES, side: int = SIDE) -> Workload:
    """Inception v4 with these numbers of modules A, B and C, on images of at least 75 pixels a side."""
    of_a, of_b, of_c = modules
    model = nn.Sequential(
        Convolution(3, 32, 3, stride=2, padding=0),
        Convolution(32, 32, 3, padding=0),
        Convolution(32, 64, 3),
        Beside(nn.MaxPool2d(3, 2), Convolution(64, 96, 3, 2, padding=0)),
        Beside(
            nn.Sequential(Convolution(160, 64, 1), Convolution(64, 96, 3, padding=0)),
            nn.Sequential(
                Convolution(160, 64, 1),
                Convolution(64, 64, (1, 7)),
                Convolution(64, 64, (7, 1)),
                Convolution(64, 96, 3, padding=0),
            ),
        ),
        Beside(Convolution(192, 192, 3, 2, padding=0), nn.MaxPool2d(3, 2)),  # to 35 x 35
        *(_module_a() for _ in range(of_a)),
        Beside(
            Convolution(384, 384, 3, 2, padding=0),
            nn.Sequential(Convolution(384, 192, 1), Convolution(192, 224, 3), Convolution(224, 256, 3, 2, padding=0)),
            nn.MaxPool2d(3, 2),
        ),  # to 17 x 17
        *(_module_b() for _ in range(of_b)),
        Beside(
            nn.Sequential(Convolution(1024, 192, 1), Convolution(192, 192, 3, 2, padding=0)),
            nn.Sequential(
                Convolution(1024, 256, 1),
                Convolution(256, 256, (1, 7)),
                Convolution(256, 320, (7, 1)),
                Convolution(320, 320, 3, 2, padding=0),
            ),
            nn.MaxPool2d(3, 2),
        ),  # to 8 x 8
        *(_module_c() for _ in range(of_c)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(DROPOUT),
        nn.Linear(1536, IMAGENET_CLASSES),
    )
    return image_workload(model, batch, side)


def _module_a() -> Beside:
    return Beside(
        Convolution(384, 96, 1),
        nn.Sequential(Convolution(384, 64, 1), Convolution(64, 96, 3)),
        nn.Sequential(Convolution(384, 64, 1), Convolution(64, 96, 3), Convolution(96, 96, 3)),
        nn.Sequential(_pool(), Convolution(384, 96, 1)),
    )


def _module_b() -> Beside:
    return Beside(
        Convolution(1024, 384, 1),
        nn.Sequential(Convolution(1024, 192, 1), Convolution(192, 224, (1, 7)), Convolution(224, 256, (7, 1))),
        nn.Sequential(
            Convolution(1024, 192, 1),
            Convolution(192, 192, (7, 1)),
            Convolution(192, 224, (1, 7)),
            Convolution(224, 224, (7, 1)),
            Convolution(224, 256, (1, 7)),
        ),
        nn.Sequential(_pool(), Convolution(1024, 128, 1)),
    )


def _module_c() -> Beside:
    return Beside(
        Convolution(1536, 256, 1),
        nn.Sequential(Convolution(1536, 384, 1), _fork(384)),
        nn.Sequential(
            Convolution(1536, 384, 1), Convolution(384, 448, (3, 1)), Convolution(448, 512, (1, 3)), _fork(512)
        ),
        nn.Sequential(_pool(), Convolution(1536, 256, 1)),
    )


def _pool() -> nn.AvgPool2d:
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


def _fork(channels: int) -> Beside:
    return Beside(Convolution(channels, 256, (1, 3)), Convolution(channels, 256, (3, 1)))
