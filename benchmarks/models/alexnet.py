"""AlexNet in two forms: as in convnet-benchmarks, which vDNN's evaluation follows, and wider on 227 x 227 images.

alexnet() is the single tower of "One weird trick" (Krizhevsky 2014). alexnet_227() has the layers of the 2012 paper
without its two groups, as in the reimplementations of vDNN. Every ReLU is in place. There is no dropout and no local
response normalization.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

HIDDEN = 4096


def alexnet(batch: int) -> Workload:
    return image_workload(_alexnet((64, 192, 384, 256, 256), padding=2), batch, 224)


def alexnet_227(batch: int) -> Workload:
    return image_workload(_alexnet((96, 256, 384, 384, 256), padding=0), batch, 227)


def narrow_alexnet(batch: int) -> Workload:
    """alexnet() with an eighth of its channels and hidden units."""
    return image_workload(_alexnet((8, 24, 48, 32, 32), padding=2, hidden=HIDDEN // 8), batch, 224)


def _alexnet(channels: tuple[int, int, int, int, int], padding: int, hidden: int = HIDDEN) -> nn.Sequential:
    first, second, third, fourth, fifth = channels
    return nn.Sequential(
        nn.Conv2d(3, first, 11, stride=4, padding=padding),  # to 55 x 55
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),  # to 27 x 27
        nn.Conv2d(first, second, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),  # to 13 x 13
        nn.Conv2d(second, third, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(third, fourth, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(fourth, fifth, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),  # to 6 x 6
        nn.Flatten(),
        nn.Linear(fifth * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, IMAGENET_CLASSES),
    )
