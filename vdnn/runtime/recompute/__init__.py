"""How a saved tensor is made again, read off the autograd graph of the running step.

find_recipe goes from a tensor's node back to values that are saved in any case, through operations of an audited table,
and returns a Recipe: steps and operands, that own no part of the graph. note_saved, NormWatch, observe_flags and
observe_parameters tell it what the graph does not: which outputs are saved, what a norm was called with, which settings
of torch an operation ran under, which version of a leaf it read.
"""

from vdnn.runtime.recompute.finder import find_recipe, owner_recipe
from vdnn.runtime.recompute.flag_epochs import observe_flags
from vdnn.runtime.recompute.layouts import UnknownLayoutError
from vdnn.runtime.recompute.leaf_versions import observe, observe_parameters
from vdnn.runtime.recompute.node_notes import note_saved
from vdnn.runtime.recompute.norm_calls import NormWatch
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.recompute.table import recipe_names

__all__ = [
    "NormWatch",
    "Recipe",
    "UnknownLayoutError",
    "find_recipe",
    "note_saved",
    "observe",
    "observe_flags",
    "observe_parameters",
    "owner_recipe",
    "recipe_names",
]
