"""Copies of the leaves and small saves that recipes read, for a policy that discards without a plan.

With a plan, the recorded step has tried each recipe at the use. Without a plan, nothing shows whether a program writes
to a parameter between forward and backward: a write through `.data` changes no version counter. So operands that are
not managed are copied when the first recipe of a step needs them, and recipes read the copies.

[Note: Copies that are shared] Recipes share a copy between two places where a program may write: the begin and the end
of a module's call; a use, which is in a backward; an optimizer's step; the end of a step. A graph of an earlier step
may be alive still, with copies of what the weights were: a loss that is not overwritten yet keeps it, if its backward
retained the graph. A step of a fused optimizer, as any write through `.data`, leaves the version as it was.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.recompute.given import Constant, Given, Leaf, has_memory
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.storage.kept import KeptTensor


class _Snapshot(NamedTuple):
    original: weakref.ref[torch.Tensor]
    version: int
    copy: weakref.ref[torch.Tensor]


class Snapshots:
    """Copies of operands. Recipes that read the same version share a copy, which lives as long as one of them: see
    [Note: Copies that are shared]."""

    def __init__(self, running: _C.RunningModules) -> None:
        self._known: dict[int, _Snapshot] = {}  # by identity of the original
        self._running, self._boundaries = running, 0

    def renew(self) -> None:
        """Recipes from now on share no copy with those from before: the program may have written since."""
        self._known.clear()

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe, with copies in place of operands that are not managed."""
        copied: list[Given] | None = None
        for index, given in enumerate(recipe.given):
            if isinstance(given, tuple) and not isinstance(given, Constant):
                if copied is None:
                    copied = list(recipe.given)
                    self._renew_at_boundaries()
                copied[index] = self._copied(given)
        if copied is None:
            return recipe
        nodes = recipe.sensitive_nodes, recipe.rounding_nodes
        return Recipe(recipe.template, recipe.operands, tuple(copied), *nodes, recipe.light_operands)

    def _renew_at_boundaries(self) -> None:
        boundaries = self._running.boundaries
        if boundaries != self._boundaries:
            self._boundaries = boundaries
            self.renew()

    def _copied(self, given: KeptTensor | Leaf) -> Given:
        tensor, version = given[0], given[1]
        if tensor._version != version or not has_memory(tensor):
            return given  # the recompute raises an error, unless the memory is back by then
        key = id(tensor)
        known = self._known.get(key)
        if known is not None and known.original() is tensor and known.version == version:
            shared = known.copy()
            if shared is not None:
                return shared, 0
        copy = tensor.detach().clone() if torch.is_grad_enabled() else tensor.clone()  # one operation less
        if copy.stride() != tensor.stride():
            return given  # overlapping or sparse strides, which a clone does not keep
        # No reference to the original outlives its copy: torch swaps no tensor that has one.
        ends = weakref.ref(copy, lambda _: self._known.pop(key, None))
        self._known[key] = _Snapshot(weakref.ref(tensor), version, ends)
        return copy, 0
