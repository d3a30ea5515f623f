"""The parts of a training step, and ExaminedTraining, which makes the parts on tensors without data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vdnn.errors import InvalidArgumentError
from vdnn.runtime.rehearsal.rehearsal import OPTIMIZERS
from vdnn.runtime.rehearsal.subjects import Staged, optimizers_of, subject_of


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one step. Either `loss` computes the loss of one batch, or `step` is the user's step: with
    `is_whole` it includes the optimizer's step, else it ends with the backward pass. `inputs` count as resident."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    inputs: object
    loss: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    is_whole: bool = False

    def compute_loss(self) -> torch.Tensor:
        if self.loss is None:
            raise RuntimeError("expected Parts with a loss or a step, got neither.")
        return scalar_loss(self.loss())


class ExaminedTraining(ABC):
    """The training that an examination is about."""

    name: str
    batch: int
    can_be_cut: bool  # the advisor calls the backward pass itself, so it can do so for parts of a batch
    samples: int | None = None  # in the data set: no batch is larger

    @abstractmethod
    def parts(self, batch: int) -> Parts:
        """The parts on tensors without data. Called inside a virtual machine."""


def staged_of(parts: Parts) -> Staged:
    """The same step as rehearsals of whole trainings take it, which step the optimizer and clear gradients."""
    if parts.step is not None and parts.is_whole:
        program = SimpleNamespace(model=parts.model, optimizer=parts.optimizer, inputs=parts.inputs)
        return Staged(parts.model, parts.step, program=program)

    def step() -> None:
        if parts.step is not None:
            parts.step()
        else:
            parts.compute_loss().backward()  # type: ignore[no-untyped-call]

    return Staged(parts.model, step, parts.inputs, parts.optimizer)


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


# WorkloadTraining: a function of a batch size, with any result that `vdnn plan` accepts.


class WorkloadTraining(ExaminedTraining):
    """A training from such a function. `optimizer` is a name that `vdnn plan` knows; with None the step ends with the
    backward pass."""

    def __init__(self, make: Callable[[int], Any], batch: int, *, name: str, optimizer: str | None = None) -> None:
        if type(batch) is not int or batch < 1:
            raise ValueError(f"batch: expected a number, 1 or more, got {batch!r}.")
        if optimizer is not None and optimizer not in OPTIMIZERS:
            known = ", ".join(map(repr, OPTIMIZERS))
            raise InvalidArgumentError(argument="optimizer", expected=f"one of {known}", got=repr(optimizer))
        self.name, self.batch = name, batch
        self.can_be_cut = True
        self._make, self._optimizer = make, optimizer

    def parts(self, batch: int) -> Parts:
        staged = subject_of(self._make, batch).make()
        check_model(staged.model)
        optimizer = staged.optimizer
        if self._optimizer is not None:
            optimizer = OPTIMIZERS[self._optimizer](staged.model.parameters())
        if staged.compute_loss is not None:
            return Parts(staged.model, optimizer, staged.inputs, loss=staged.compute_loss)
        own = optimizers_of(staged)
        return Parts(staged.model, own[0] if own else optimizer, None, step=staged.step, is_whole=bool(own))
