"""Copies of the leaves and small saves that recipes read, for a policy that discards without a plan.

With a plan, the recorded step has tried each recipe at the use. Without a plan, nothing shows whether a program writes
to a parameter between forward and backward: a write through `.data` changes no version counter. So operands that are
not managed are copied when the first recipe of a step needs them, and recipes read the copies.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NamedTuple

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.recompute.given import Constant, Given, tensor_read
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.storage.packed_view import PackedView


class _Snapshot(NamedTuple):
    original: weakref.ref[torch.Tensor]
    version: int
    copy: weakref.ref[torch.Tensor]


class Snapshots:
    """Copies of operands. All recipes that read the same version share a copy, which lives as long as one of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Snapshot] = {}  # by identity of the original

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe, with copies in place of operands that are not managed."""
        return replace(recipe, given=tuple(self._copied(given) for given in recipe.given), fetch=None)

    def _copied(self, given: Given) -> Given:
        if isinstance(given, (PackedView, Constant, KeptSave, LightSave)):
            return given
        tensor, version = tensor_read(given)
        if tensor._version != version:
            return given  # the recompute raises OperandModifiedError
        known = self._known.get(id(tensor))
        copy = None
        if known is not None and known.original() is tensor and known.version == version:
            copy = known.copy()
        if copy is None:
            with torch.no_grad():
                copy = tensor.clone()
            if copy.stride() != tensor.stride():
                return given  # overlapping or sparse strides, which a clone does not keep
            key = id(tensor)
            ends = weakref.ref(copy, lambda _: self._known.pop(key, None))
            self._known[key] = _Snapshot(weakref.ref(tensor), version, ends)
        return copy, copy._version
