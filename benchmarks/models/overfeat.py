"""OverFeat, the fast model, on 231 x 231 images.

Sermanet and others 2013, as convnet-benchmarks has it, which vDNN's evaluation follows. Every ReLU is in place; no
dropout.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload


def overfeat(batch: int) -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4),  # to 56 x 56
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(96, 256, 5),  # to 24 x 24
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(256, 512, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(512, 1024, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(1024, 1024, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),  # to 6 x 6
        nn.Flatten(),
        nn.Linear(1024 * 6 * 6, 3072),
        nn.ReLU(inplace=True),
        nn.Linear(3072, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, IMAGENET_CLASSES),
    )
    return image_workload(model, batch, 231)
