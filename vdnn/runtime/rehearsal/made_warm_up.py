"""Makes what a warm-up step leaves to the next one, without running a step: gradients, and the state of optimizers.

The step that a rehearsal counts begins as one in the middle of a training. Most steps leave nothing else behind, and
running one for that takes as long as the step that counts: minutes for a model with a loop over time. Afterwards
MadeWarmUp tells whether that was so. If the step has left other storages than it found, written to one of them, drawn a
random number, or given other parameters gradients, what follows it may differ, so a step has to warm up.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from vdnn.runtime.machine.allocation_tracker import AllocationTracker
from vdnn.runtime.rehearsal.subjects import Staged, held_by
from vdnn.runtime.rehearsal.user_code import user_code
from vdnn.runtime.torch_internals.random_state import random_states
from vdnn.runtime.torch_internals.tensor_kinds import storage_of


class MadeWarmUp:
    """Stands for a warm-up step of `staged`, and judges the step that the caller then runs, without gradients."""

    def __init__(
        self,
        staged: Staged,
        updates: torch.optim.Optimizer | None,
        tracker: AllocationTracker,
        unused: frozenset[str],
    ) -> None:
        """`unused`: the names of parameters that the step gives no gradient."""
        self._model = staged.model
        self._tracker = tracker
        self.unused = unused
        self._held = [one for one in _tensors([staged.model, *held_by(staged)]) if not one.is_inference()]
        for name, parameter in staged.model.named_parameters():
            if parameter.requires_grad and name not in unused:
                parameter.grad = torch.empty_like(parameter)
        if updates is not None:
            with user_code("calling the optimizer's step()"):
                updates.step()
        self._made = self._gradient_bytes()
        self._called: set[torch.nn.Module] = set()
        self._differs = False

    def _gradient_bytes(self) -> dict[str, int]:
        return {name: _nbytes(one.grad) for name, one in self._model.named_parameters() if one.grad is not None}

    @staticmethod
    def suits(staged: Staged) -> bool:
        """False for a program with a step of its own, which may count its steps, and for batch norms, which count
        theirs."""
        counts = (getattr(one, "num_batches_tracked", None) for one in staged.model.modules() if one.training)
        return staged.compute_loss is not None and all(one is None for one in counts)

    @contextlib.contextmanager
    def counted(self, is_managed: Callable[[torch.UntypedStorage], bool]) -> Iterator[None]:
        """A context around the step that counts, until an optimizer steps. `is_managed` tells whether the session has
        taken a storage for one that may move."""
        self._storages, random_before = self._tracker.live_storages(), random_states()
        versions = [one._version for one in self._held]

        def called(module: torch.nn.Module, args: object) -> None:
            # A session knows frozen parameters and buffers by calls of their modules, which a warm-up step makes.
            if module not in self._called:
                self._called.add(module)
                self._differs |= any(is_managed(storage) for storage in _storages_of(module))

        hook = register_module_forward_pre_hook(called)
        try:
            yield
        finally:
            hook.remove()
        found = self._gradient_bytes()
        self.unused |= self._made.keys() - found.keys()
        has_written = versions != [one._version for one in self._held]
        self._differs |= has_written or found != self._made or random_before != random_states()

    @property
    def others_are_unused(self) -> bool:
        """True if parameters got no gradient from which one was expected."""
        return not self._made.keys().isdisjoint(self.unused)

    def was_a_later_step(self) -> bool:
        """The step is over, and its gradients are freed: would the next one begin as this one did?"""
        if self._differs:
            return False
        if not self._are_storages_the_same():
            gc.collect()  # cycles of garbage may hold some
        return self._are_storages_the_same()

    def _are_storages_the_same(self) -> bool:
        now, before = self._tracker.live_storages(), self._storages
        return now.keys() == before.keys() and all(now[key] is token for key, token in before.items())

    def parameter_bytes(self) -> int:
        """The bytes of the parameters and buffers of all modules that the step called."""
        storages = [storage for module in self._called for storage in _storages_of(module)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _storages_of(module: torch.nn.Module) -> Iterator[torch.UntypedStorage]:
    """Those of its own parameters and buffers."""
    for one in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        storage = storage_of(one)
        if storage is not None:
            yield storage


def _nbytes(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else storage.nbytes()


def _tensors(held: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of modules, also those that they do not register."""
    for one in held:
        if isinstance(one, torch.nn.Module):
            for module in one.modules():
                found = (module._parameters, module._buffers, list(vars(module).values()))
                yield from (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        elif isinstance(one, torch.Tensor):
            yield one
