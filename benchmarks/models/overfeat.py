"""OverFeat, the fast model, on 231 x 231 images.

Sermanet and others 2013, as in convnet-benchmarks, which vDNN's evaluation follows. Every ReLU is in place. There is no
dropout.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload


def overfeat(batch: int, narrowing: int = 1) -> Workload:
    """OverFeat with all channels divided by `narrowing`."""
    first, second, third, fourth = (channels // narrowing for channels in (96, 256, 512, 1024))
    hidden, last = 3072 // narrowing, 4096 // narrowing
    model = nn.Sequential(
        nn.Conv2d(3, first, 11, stride=4),  # to 56 x 56
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),  # to 24 x 24
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(third, fourth, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(fourth, fourth, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),  # to 6 x 6
        nn.Flatten(),
        nn.Linear(fourth * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, last),
        nn.ReLU(inplace=True),
        nn.Linear(last, IMAGENET_CLASSES),
    )
    return image_workload(model, batch, 231)
