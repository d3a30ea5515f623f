"""How a saved tensor is made again, read off the autograd graph of the running step.

find_recipe goes from a tensor's node back to values that are saved in any case, through operations of an audited table,
and returns a Recipe: steps and operands, that own no part of the graph. note_saved, note_module and observe_parameters
tell it what the graph does not: which outputs are saved, what a norm's module knows, which version of a leaf was read.
"""

from vdnn.runtime.recompute.finder import find_recipe, owner_recipe
from vdnn.runtime.recompute.leaf_versions import observe, observe_parameters
from vdnn.runtime.recompute.node_notes import note_module, note_saved
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.recompute.table import recipe_names

__all__ = [
    "Recipe",
    "find_recipe",
    "note_module",
    "note_saved",
    "observe",
    "observe_parameters",
    "owner_recipe",
    "recipe_names",
]
