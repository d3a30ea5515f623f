"""Workload: the parts of one training step, which are a model, its inputs and the loss of its output.

Inside FakeTensorMode, a virtual machine or `with torch.device("cuda")`, the model and its inputs belong to that mode or
are on that device. Nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

IMAGENET_CLASSES = 1000


class Workload(NamedTuple):
    """One step: `loss(model(*inputs)).backward()`, which step() does. The loss owns its targets."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]

    def step(self) -> None:
        self.loss(self.model(*self.inputs)).backward()  # type: ignore[no-untyped-call]

    @property
    def parameter_count(self) -> int:
        """The number of parameters. A tied parameter counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


class CrossEntropy:
    """The mean cross entropy with fixed random classes. The classes are dimension 1, or with `last` the last one."""

    def __init__(self, classes: int, *shape: int, last: bool = False) -> None:
        self.targets = torch.randint(classes, shape)
        self.last = last

    def __call__(self, output: Tensor) -> Tensor:
        if self.last:
            return functional.cross_entropy(output.flatten(0, -2), self.targets.flatten())
        return functional.cross_entropy(output, self.targets)


def image_workload(model: nn.Module, batch: int, side: int) -> Workload:
    """`model` on square colour images with ImageNet's classes."""
    return Workload(model, (images(batch, side),), CrossEntropy(IMAGENET_CLASSES, batch))


def images(batch: int, side: int) -> Tensor:
    """Random square colour images."""
    return torch.randn(batch, 3, side, side)
