"""Compares each recipe of a compiled search with the one that the search itself finds for the same tensor.

`shadowing` is on in all tests of recipes and in the random programs (see their conftest).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.recompute import compiled_search
from vdnn.runtime.recompute.finder import Search, Wanted, search_recipe
from vdnn.runtime.recompute.given import Constant, Given, Unpack
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.storage.packed_view import PackedView


@dataclass
class Shadow:
    """Counts of one test. `differences` has a sentence for each recipe that differs."""

    compared: int = 0
    searched: int = 0
    differences: list[str] = field(default_factory=list)


@contextmanager
def shadowing() -> Iterator[Shadow]:
    """While entered, every recipe of a compiled search is compared. Raises AssertionError at the end if one differs."""
    shadow = Shadow()
    run = compiled_search._CompiledSearches.run

    def compared(self: Any, wanted: Wanted, unpack: Unpack, avoided: int, *rest: Any) -> Recipe | None:
        recipe = run(self, wanted, unpack, avoided, *rest)
        if recipe is None:
            shadow.searched += 1
            return None
        shadow.compared += 1
        max_depth, expensive = self.limits
        found = search_recipe(wanted, Search(unpack, max_depth, expensive, avoided))
        complaint = "the search finds none" if found is None else difference_of_recipes(recipe, found[0])
        if complaint:
            shadow.differences.append(f"{recipe.name}: {complaint}")
        return recipe

    compiled_search._CompiledSearches.run = compared  # type: ignore[method-assign]
    try:
        yield shadow
    finally:
        compiled_search._CompiledSearches.run = run  # type: ignore[method-assign]
    assert not shadow.differences, shadow.differences[:5]


def difference_of_recipes(one: Recipe, other: Recipe) -> str:
    """The name of the first field that differs; empty if the recipes are equal."""
    for name in ("name", "operand_depths", "depth", "is_cheap", "geometry", "flags", "signature", "shapeless"):
        ours, theirs = getattr(one.template, name), getattr(other.template, name)
        if ours != theirs:
            return f"{name}: {ours} instead of {theirs}"
    if one.nodes != other.nodes:
        return f"nodes: {one.nodes} instead of {other.nodes}"
    for name in ("given", "operands"):
        ours, theirs = getattr(one, name), getattr(other, name)
        if len(ours) != len(theirs) or not all(map(_is_same, ours, theirs)):
            return name
    if len(one.steps) != len(other.steps):
        return "steps"
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        if ours.operation is not theirs.operation or ours[2:] != theirs[2:]:
            return f"step {ours.operation.name}"
        if ours.call != theirs.call or repr(ours.call) != repr(theirs.call):
            return f"call {ours.call} instead of {theirs.call}"
    return ""


def _is_same(one: Given, other: Given) -> bool:
    if isinstance(one, PackedView):
        return one is other or (
            isinstance(other, PackedView) and one.managed is other.managed and one.geometry == other.geometry
        )
    if isinstance(one, Constant) and isinstance(other, Constant):
        return type(one.value) is type(other.value) and repr(one.value) == repr(other.value)
    if isinstance(one, (KeptSave, LightSave)) or isinstance(other, (KeptSave, LightSave, PackedView)):
        return one is other
    return type(one) is type(other) and one[0] is other[0] and one[1:] == other[1:]
