"""A pack hook that keeps every tensor, returns stand-ins for managed saves, and runs each recipe that is found.

Every tensor that is not a leaf is packed as a managed save. If find_recipe returns a recipe, it runs at once and again
at every use of the tensor, and the result is compared with the kept tensor bit for bit. Nothing is trusted, and nothing
is skipped silently.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.recompute import (
    Recipe,
    UnknownLayoutError,
    find_recipe,
    note_saved,
    observe,
    observe_flags,
    observe_flags_at_save,
    observe_parameters,
    owner_recipe,
)
from vdnn.runtime.storage.packed_view import PackedView


def operation_names(recipe: Recipe) -> tuple[str, ...]:
    """The names, in the order in which the operations run."""
    return tuple(step.operation.name for step in recipe.steps)


class StandIn(PackedView):
    """A managed save that is always on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.recipe: Recipe | None = None
        self.geometry = (tensor.dtype, tensor.size(), tensor.stride())
        address = tensor.untyped_storage()._cdata
        self.managed: Any = SimpleNamespace(witness=self.tensor, version=tensor._version, native_address=address)


class Saving:
    """Packs tensors and tries recipes on this thread while entered. `asked`: the operands as they were unpacked."""

    def __init__(self, max_depth: int = 8, *, expensive: bool = True, recomputes: bool = True) -> None:
        self._max_depth = max_depth
        self._expensive = expensive
        self._recomputes = recomputes
        self.saves = 0
        self.recomputed_at_use = 0
        self.recipes: list[Recipe] = []
        self.failures: list[str] = []
        self.names: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.asked: list[object] = []
        self.without_history: list[StandIn] = []

    def __enter__(self) -> Saving:
        observe_flags()
        module_hooks = torch.nn.modules.module

        def before(module: torch.nn.Module, args: object) -> None:
            observe_parameters(module)
            observe_flags()

        self._handle = module_hooks.register_module_forward_pre_hook(before)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        self._handle.remove()
        self.without_history.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        self.saves += 1
        observe_flags_at_save(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            observe(tensor)
            return tensor, tensor._version
        packed = StandIn(tensor)
        node = tensor.grad_fn
        for one in self.without_history[:]:
            recipe = owner_recipe(one, node, self.unpack)
            if recipe is not None:
                one.recipe = recipe
                self._tried(recipe, one.tensor)
                self.without_history.remove(one)
        if node is None:
            if not tensor.is_floating_point():
                self.without_history.append(packed)
            return packed
        recipe = find_recipe(tensor, node, self.unpack, max_depth=self._max_depth, expensive=self._expensive)
        if recipe is not None:
            with contextlib.suppress(UnknownLayoutError):
                self._tried(recipe, tensor)
                packed.recipe = recipe
        note_saved(node, tensor.output_nr, packed)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, StandIn):
            leaf: torch.Tensor = packed[0]
            return leaf
        if packed.recipe is not None and self._recomputes:
            self.recomputed_at_use += 1
            self._compared(packed.recipe, packed.tensor, _held)
        return packed.tensor

    def _tried(self, recipe: Recipe, tensor: torch.Tensor) -> None:
        """Raises UnknownLayoutError if the recipe cannot be followed."""
        asked: list[object] = []

        def unpack(packed: Any) -> torch.Tensor:
            asked.append(packed)
            return _held(packed)

        if self._recomputes:
            self._compared(recipe, tensor, unpack)
            if asked != list(recipe.operands):
                self.failures.append(f"{recipe.name}: asked for {len(asked)} operands of {len(recipe.operands)}")
        self.recipes.append(recipe)
        self.names[recipe.name] += 1
        self.operations.update(operation_names(recipe))

    def _compared(self, recipe: Recipe, tensor: torch.Tensor, unpack: Any) -> None:
        try:
            complaint = difference(recipe.recompute(unpack), tensor)
        except UnknownLayoutError:
            raise
        except VdnnError as error:  # the caller of the operation may expect errors
            complaint = str(error)
        if complaint:
            self.failures.append(f"{recipe.name}: {complaint}")


def _held(packed: Any) -> torch.Tensor:
    held: torch.Tensor = packed.tensor if isinstance(packed, StandIn) else packed[0]
    return held


def difference(recomputed: torch.Tensor, tensor: torch.Tensor) -> str:
    """The differences of a recomputed tensor from the original, or from the original's base. Empty if equal."""
    geometry = (recomputed.dtype, recomputed.size(), recomputed.stride(), recomputed.storage_offset())
    bases = [one for one in (tensor, tensor._base) if one is not None]
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    if not is_part and geometry not in [(one.dtype, one.size(), one.stride(), one.storage_offset()) for one in bases]:
        return f"{geometry} instead of {(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())}"
    ours, theirs = (torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()) for one in (recomputed, tensor))
    if ours.numel() != theirs.numel():
        return f"{ours.numel()} bytes instead of {theirs.numel()}"
    unequal = int((ours != theirs).sum())
    return f"{unequal} of {ours.numel()} bytes differ" if unequal else ""
