"""WorkloadTraining: a function of a batch size, which returns what it may return for `vdnn plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vdnn.advisor.parts import Parts, Training, check_model
from vdnn.errors import InvalidArgumentError
from vdnn.runtime.rehearsal.rehearsal import OPTIMIZERS
from vdnn.runtime.rehearsal.subjects import optimizers_of, subject_of


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
        staged = subject_of(self._make, batch).make()
        check_model(staged.model)
        optimizer = staged.optimizer
        if self._optimizer is not None:
            optimizer = OPTIMIZERS[self._optimizer](staged.model.parameters())
        if staged.compute_loss is not None:
            return Parts(staged.model, optimizer, staged.inputs, loss=staged.compute_loss)
        own = optimizers_of(staged)
        return Parts(staged.model, own[0] if own else optimizer, None, step=staged.step, is_whole=bool(own))
