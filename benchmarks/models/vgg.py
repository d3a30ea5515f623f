"""VGG-16 and the four deeper networks of the vDNN paper, on 224 x 224 images or, for VGG-16, other sizes.

Simonyan and Zisserman 2014, configuration D. VGG-116, 216, 316 and 416 are from the vDNN paper: per 100 layers, each
of the five groups has 20 more convolutions. Every ReLU is in place, as in the Torch models that the paper trains, so a
convolution's output is one map and not two. There is no dropout, as in convnet-benchmarks.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

SIDE = 224
# Channels and number of convolutions of each group of VGG-16; a max pooling ends each group.
GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
ADDED_PER_HUNDRED = 20
HIDDEN = 4096


def vgg16(batch: int, side: int = SIDE) -> Workload:
    """VGG-16. `side` is a multiple of 32. For smaller images the first fully connected layer is smaller."""
    return vgg(batch, added=0, side=side)


def vgg116(batch: int) -> Workload:
    return vgg(batch, added=ADDED_PER_HUNDRED)


def vgg216(batch: int) -> Workload:
    return vgg(batch, added=2 * ADDED_PER_HUNDRED)


def vgg316(batch: int) -> Workload:
    return vgg(batch, added=3 * ADDED_PER_HUNDRED)


def vgg416(batch: int) -> Workload:
    return vgg(batch, added=4 * ADDED_PER_HUNDRED)


def vgg(batch: int, *, added: int, side: int = SIDE, narrowing: int = 1) -> Workload:
    """VGG with `added` more convolutions in each group, and with all channels divided by `narrowing`."""
    layers: list[nn.Module] = []
    inputs = 3
    hidden = HIDDEN // narrowing
    for channels, count in ((wide // narrowing, count) for wide, count in GROUPS):
        for _ in range(count + added):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = channels
        layers.append(nn.MaxPool2d(2))
    left = side // 2 ** len(GROUPS)
    layers += [
        nn.Flatten(),
        nn.Linear(inputs * left * left, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, IMAGENET_CLASSES),
    ]
    return image_workload(nn.Sequential(*layers), batch, side)
