"""Recipes: how a saved tensor can be recomputed, read from the autograd graph of the running step.

find_recipe walks from a tensor's node back to values that are saved in any case, through operations of an audited
table. It returns a Recipe (steps and operands), which owns no part of the graph. note_saved, observe_flags
and observe_parameters supply the facts that the graph lacks: which outputs are saved, the settings of torch under which
an operation ran, the arguments of a norm's call, and the version of a leaf that it read.
"""

from vdnn._C import note_saved
from vdnn.runtime.recompute.backend_flags import observe_flags, observe_flags_at_save
from vdnn.runtime.recompute.compiled_search import find_recipe
from vdnn.runtime.recompute.finder import owner_recipe
from vdnn.runtime.recompute.layouts import UnknownLayoutError
from vdnn.runtime.recompute.leaf_versions import observe, observe_parameters
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.recompute.table import recipe_names

__all__ = [
    "Recipe",
    "UnknownLayoutError",
    "find_recipe",
    "note_saved",
    "observe",
    "observe_flags",
    "observe_flags_at_save",
    "observe_parameters",
    "owner_recipe",
    "recipe_names",
]
