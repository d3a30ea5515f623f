"""WorkloadTraining: a function of a batch size that returns (model, inputs, loss), as for `vdnn plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vdnn.advisor.parts import Parts, Training, check_model
from vdnn.errors import InvalidArgumentError
from vdnn.runtime.rehearsal.rehearsal import OPTIMIZERS, loss_of


class WorkloadTraining(Training):
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
        made = self._make(batch)
        model = made[0] if isinstance(made, tuple) and len(made) in (2, 3) else getattr(made, "model", None)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                "advise: expected a function that, called with a batch size, returns (model, inputs), (model, inputs, "
                f"loss), or an object with `model` and `step()`, got one that returns {type(made).__name__}. For a "
                "function that returns the model, loader and optimizer of a loop, leave out --batch."
            )
        check_model(model)
        optimizer = None if self._optimizer is None else OPTIMIZERS[self._optimizer](model.parameters())
        if not isinstance(made, tuple):
            return Parts(model, optimizer, None, step=made.step)
        inputs, loss = made[1], made[2] if len(made) == 3 else loss_of
        return Parts(model, optimizer, inputs, loss=functools.partial(_loss, model, inputs, loss))


def _loss(model: torch.nn.Module, inputs: Any, loss: Callable[[Any], object]) -> object:
    if isinstance(inputs, dict):
        return loss(model(**inputs))
    return loss(model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs))
