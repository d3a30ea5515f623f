"""LoopTraining: a training loop as a model, its loader, its optimizer, and the loss or the step. All stay unchanged.

Real steps run on copies. For a rehearsal, the copies have tensors without data, on the CPU, which stands for the card.
A larger batch is the first batch with a larger first dimension.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from vdnn.advisor.parts import ExaminedTraining, Parts, check_model
from vdnn.errors import InvalidArgumentError

Loss = Callable[..., object]
Step = Callable[[torch.nn.Module, torch.optim.Optimizer, Any], object]


class LoopTraining(ExaminedTraining):
    """A training loop. It calls `loss(output, target)` for batches that are pairs, and `loss(output)` for others.
    Without a loss, the output has to contain one. `step(model, optimizer, batch)` instead does a whole step: forward
    and backward passes, the optimizer's step, and zero_grad."""

    def __init__(
        self,
        model: torch.nn.Module,
        loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        *,
        step: Step | None = None,
        name: str | None = None,
    ) -> None:
        self.model = check_model(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if not hasattr(loader, "__iter__") or isinstance(loader, Iterator):
            raise TypeError(
                "loader: expected an iterable that can be iterated more than once, such as a DataLoader or a list of "
                f"batches, got {type(loader).__name__}: batches taken from it would be missing in your training."
            )
        if loss is not None and step is not None:
            raise ValueError("expected a loss or a step, got both: a step computes its own loss.")
        for argument, given in (("loss", loss), ("step", step)):
            if given is not None and not callable(given):
                raise TypeError(f"{argument}: expected a function, got {type(given).__name__}.")
        self.loader, self.optimizer, self.loss, self.step = loader, optimizer, loss, step
        self.name = name or type(model).__name__
        self.can_be_cut = step is None
        data: Any = getattr(loader, "dataset", None)
        self.samples = len(data) if hasattr(data, "__len__") else None
        self.sample: Any = None
        self.batch = 0

    @property
    def device(self) -> torch.device:
        return next(parameter.device for parameter in self.model.parameters())

    def take_sample(self, batch: Any) -> None:
        """Take `batch` as the one to rehearse. Refuses a batch without tensors."""
        sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not sizes:
            raise InvalidArgumentError(
                argument="loader", expected="batches with tensors", got=f"one of type {type(batch).__name__}"
            )
        self.sample, self.batch = batch, sizes[0]
        if isinstance(self.loader, Sequence):
            self.samples = len(self.loader) * self.batch

    def copies(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, Loss | None]:
        """Copies of the model, the optimizer and the loss, with data, on the same device, in training mode."""
        return self._copied({})

    def parts(self, batch: int) -> Parts:
        memo: dict[int, Any] = {}
        for tensor in _held_by(self.model, self.optimizer, self.loss):
            memo[id(tensor)] = _without_data(tensor)
        with _disable_current_modes():
            model, optimizer, loss = self._copied(memo)
        inputs = tree_map_only(torch.Tensor, functools.partial(self._resized, batch=batch), self.sample)
        return self.parts_of(model, optimizer, loss, inputs)

    def parts_of(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Loss | None, batch: Any
    ) -> Parts:
        if self.step is not None:
            step = functools.partial(self.step, model, optimizer, batch)
            return Parts(model, optimizer, batch, step=step, is_whole=True)
        return Parts(model, optimizer, batch, loss=functools.partial(_loss, model, loss, batch))

    def _copied(self, memo: dict[int, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer, Loss | None]:
        """Copy everything. A model in eval() is set to train. If the model trains, submodules in eval() stay so."""
        model, optimizer, loss = copy.deepcopy((self.model, self.optimizer, self.loss), memo)
        for name, value in vars(self.optimizer).items():
            # Optimizers omit attributes from their own copy: LBFGS omits its parameters. A `step` that a scheduler has
            # set is bound to the original and is not copied.
            if not hasattr(optimizer, name) and not callable(value):
                setattr(optimizer, name, copy.deepcopy(value, memo))
        return model if model.training else model.train(), optimizer, loss

    def _resized(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        scaled = tensor.dim() > 0 and tensor.shape[0] == self.batch
        shape = (batch, *tensor.shape[1:]) if scaled else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def _held_by(*holders: Any) -> Iterator[torch.Tensor]:
    for holder in holders:
        if isinstance(holder, torch.nn.Module):
            yield from (*holder.parameters(), *holder.buffers())
        elif isinstance(holder, torch.optim.Optimizer):
            yield from (one for one in tree_leaves(list(holder.state.values())) if isinstance(one, torch.Tensor))
            yield from (one for one in tree_leaves(holder.param_groups) if isinstance(one, torch.Tensor))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _loss(model: torch.nn.Module, loss: Loss | None, batch: Any) -> object:
    targets: tuple[Any, ...] = ()
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        output, targets = model(batch[0]), (batch[1],)
    elif isinstance(batch, torch.Tensor):
        output = model(batch)
    else:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise InvalidArgumentError(
            argument="loader",
            expected="batches that are a pair of inputs and targets, a dict of arguments, or a tensor; others need "
            "step=, a function of (model, optimizer, batch)",
            got=f"a {type(batch).__name__}{size}",
        )
    if loss is not None:
        return loss(output, *targets)
    own_loss = getattr(output, "loss", None)
    if not isinstance(own_loss, torch.Tensor):
        raise InvalidArgumentError(
            argument="loss", expected=f"a function, because {type(output).__name__} has no loss", got="none"
        )
    return own_loss
