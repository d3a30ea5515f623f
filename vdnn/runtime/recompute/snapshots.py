"""Copies of the leaves and small saves that recipes read, for a policy that discards without a plan.

Under a plan a recipe is proven where it is used, in the step that was recorded. Without one nothing tells whether a
parameter is written between forward and backward: through `.data` no version counter shows it. So what is not managed
is copied when the first recipe of a step needs it, and the recipe reads the copy.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NamedTuple

import torch

from vdnn.runtime.recompute.recipe import Constant, Given, Recipe
from vdnn.runtime.storage.packed_view import PackedView


class _Snapshot(NamedTuple):
    original: weakref.ref[torch.Tensor]
    version: int
    copy: weakref.ref[torch.Tensor]


class Snapshots:
    """Shared by all recipes that read the same version; each lives as long as one of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Snapshot] = {}  # by identity of the original

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe, reading copies of what is not managed."""
        return replace(recipe, given=tuple(self._copied(given) for given in recipe.given))

    def _copied(self, given: Given) -> Given:
        if isinstance(given, (PackedView, Constant)):
            return given
        tensor, version = given[0], given[1]
        if tensor._version != version:
            return given  # following it says so
        known = self._known.get(id(tensor))
        copy = None
        if known is not None and known.original() is tensor and known.version == version:
            copy = known.copy()
        if copy is None:
            with torch.no_grad():
                copy = tensor.clone()
            if copy.stride() != tensor.stride():
                return given  # overlapping or sparse strides, of which a clone makes others
            key = id(tensor)
            ends = weakref.ref(copy, lambda _: self._known.pop(key, None))
            self._known[key] = _Snapshot(weakref.ref(tensor), version, ends)
        return copy, copy._version
