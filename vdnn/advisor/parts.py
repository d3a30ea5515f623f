"""The parts of a training step, and a training as something that can be staged: made anew where there is no data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vdnn.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Parts:
    """Either `loss` makes the loss of one batch, or `step` does all the user's step does: with `is_whole` up to the
    optimizer's, else up to the backward pass. `inputs` are counted as being there."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    inputs: object
    loss: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    is_whole: bool = False


class Training(ABC):
    """What is advised on."""

    name: str
    batch: int
    can_be_cut: bool  # whether the advisor calls the backward pass, and so can call it for parts of a batch
    samples: int | None = None  # of the data there is: no batch is larger

    @abstractmethod
    def parts(self, batch: int) -> Parts:
        """On tensors without data; called inside a virtual machine."""


def scalar_loss(found: object) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise InvalidArgumentError(argument="loss", expected="a tensor of one number", got=type(found).__name__)
    if found.numel() != 1:
        shape = list(found.shape)
        raise InvalidArgumentError(
            argument="loss", expected="a tensor of one number", got=f"one of shape {shape}: take its mean or its sum"
        )
    return found


def check_model(model: object) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidArgumentError(
            argument="model",
            expected="one with parameters to train",
            got=f"{type(model).__name__} with {sum(1 for _ in model.parameters())}, none of which requires grad",
        )
    return model
