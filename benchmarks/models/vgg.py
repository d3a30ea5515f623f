"""VGG-16 and the four networks that vDNN makes of it, on 224 x 224 images or, for VGG-16, others.

Simonyan and Zisserman 2014, configuration D. VGG-116, 216, 316 and 416 are the vDNN paper's: 20 more convolutions in
each of the five groups for each 100 layers. Every ReLU is in place, as in Torch's models that the paper trains, so a
convolution's output is one map and not two. Without dropout, as in convnet-benchmarks.
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
    """`side` is a multiple of 32. That of smaller images has a smaller first fully connected layer."""
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
    """`added` convolutions in each group. Of a narrowed one all channels are so many times fewer."""
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
