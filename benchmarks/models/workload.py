"""What one training step needs: a model, its inputs and the loss of its output.

Made wherever its function is called: inside FakeTensorMode, a virtual machine or `with torch.device("cuda")` the model
and its inputs are that mode's or on that device. Nothing here looks at data.
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
        """A tied parameter counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


class CrossEntropy:
    """The mean cross entropy against fixed random classes; the classes are dimension 1, or the last with `last`."""

    def __init__(self, classes: int, *shape: int, last: bool = False) -> None:
        self.targets = torch.randint(classes, shape)
        self.last = last

    def __call__(self, output: Tensor) -> Tensor:
        if self.last:
            return functional.cross_entropy(output.flatten(0, -2), self.targets.flatten())
        return functional.cross_entropy(output, self.targets)


def image_workload(model: nn.Module, batch: int, side: int) -> Workload:
    """`model` on square colour images of ImageNet's classes."""
    return Workload(model, (images(batch, side),), CrossEntropy(IMAGENET_CLASSES, batch))


def images(batch: int, side: int) -> Tensor:
    """Square colour images."""
    return torch.randn(batch, 3, side, side)
