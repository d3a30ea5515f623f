"""Holds a recipe for a trial later in its step without keeping its operands alive.

In a step that is recorded, or that follows no plan, a recipe is tried again at the use, where a plan would follow it.
If the recipe itself were held until then, its operands would live longer than in plain PyTorch, and the recording would
have those longer lifetimes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.recompute.given import Constant, Given, Leaf
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.storage.packed_view import PackedView


def weak_recipe(recipe: Recipe) -> Callable[[], Recipe | None]:
    """Return a function that gives the same recipe, or None if one of its operands has been freed by then."""
    later_operands = [_operand_later(given) for given in recipe.given]
    rest = replace(recipe, operands=(), given=(), light_operands=(), fetch=None)

    def made() -> Recipe | None:
        given = tuple(one for operand in later_operands if (one := operand()) is not None)
        if len(given) < len(later_operands):
            return None
        operands = tuple(one for one in given if isinstance(one, PackedView))
        light_operands = tuple(one for one in given if isinstance(one, LightSave))
        return replace(rest, operands=operands, given=given, light_operands=light_operands)

    return made


def _operand_later(given: Given) -> Callable[[], Given | None]:
    if isinstance(given, PackedView):
        return given.later()
    if isinstance(given, Constant):
        return lambda: given
    if isinstance(given, (KeptSave, LightSave)):
        return weakref.ref(given)
    tensor, rest, is_leaf = weakref.ref(given[0]), given[1:], isinstance(given, Leaf)

    def held() -> Given | None:
        alive = tensor()
        if alive is None:
            return None
        return Leaf(alive, *rest) if is_leaf else (alive, rest[0])

    return held
