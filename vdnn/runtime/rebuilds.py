"""What a session knows of rebuilding: recipes are found where tensors are saved, proven, told of, and followed.

[Note: Proven once] Before a recipe replaces a value it is tried on one that is there: rebuilt, and compared byte for
byte. What holds for one holds for all with the same operations, scalars, shapes, strides, dtypes and backend flags:
that is what a recipe's signature says. One that differs is not followed again, and that is said once. Of tensors
without data nothing can be compared: there recipes are believed, and only their cost is found out.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.gauges import Gauges
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.recompute import Recipe, find_recipe, note_module, note_saved, observe_parameters, owner_recipe
from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.step_watch import StepWatch

logger = logging.getLogger("vdnn")

_DEPTH = 8  # operations of a chain
# Saves of later operations among whose nodes the maker of integers is looked for.
_LATER_SAVES = 8


@dataclass(frozen=True, slots=True)
class Proof:
    """What it costs; `extra_bytes` above what is there when its operands are, its own included."""

    compute_ns: int
    extra_bytes: int


@dataclass(slots=True)
class _Ownerless:
    """A save without a history whose maker is yet to be found."""

    packed: weakref.ref[PackedView]
    is_to_go: bool
    tries: int = _LATER_SAVES


class Rebuilds:
    """Of one session. `our_unpack` is its hook."""

    def __init__(self, our_unpack: Callable[..., torch.Tensor], steps: StepWatch | None) -> None:
        self._our_unpack = our_unpack
        self._steps = steps
        self._proofs: dict[Hashable, Proof | None] = {}
        self._local = threading.local()

    # Torch's hooks around modules.

    def before_module(self, module: torch.nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            observe_parameters(module)

    def behind_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            note_module(module, output)

    # At the saves.

    def saved(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_new: bool) -> None:
        """Of every managed save; where nothing is planned yet, what could be rebuilt is looked for."""
        if node is not None:
            self._find_owners(node)
            note_saved(node, tensor.output_nr, packed)
        if is_new and self._steps is not None and self._steps.looks_for_rebuilds:
            self._look(packed, tensor, node, is_to_go=False)

    def drop(self, packed: PackedView, tensor: torch.Tensor, node: Any) -> bool:
        """The plan rebuilds it: gives it up, or as soon as its maker is known. False if it cannot be rebuilt."""
        return self._look(packed, tensor, node, is_to_go=True)

    def _look(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_to_go: bool) -> bool:
        managed = packed.managed
        source = managed.source_storage
        if source is None or source.nbytes() != managed.nbytes:
            return False  # a part of a storage
        if node is None:
            if tensor.dtype is not torch.int64 or tensor.requires_grad:
                return False
            self._ownerless().append(_Ownerless(weakref.ref(packed), is_to_go))
            return True
        recipe = find_recipe(tensor, node, self._our_unpack, max_depth=_DEPTH)
        return recipe is not None and self._found(managed, recipe, is_to_go=is_to_go)

    def _ownerless(self) -> list[_Ownerless]:
        found: list[_Ownerless] | None = getattr(self._local, "ownerless", None)
        if found is None:
            found = self._local.ownerless = []
        return found

    def _find_owners(self, node: Any) -> None:
        waiting = self._ownerless()
        for one in list(waiting):
            one.tries -= 1
            packed = one.packed()
            recipe = None if packed is None else owner_recipe(packed, node, self._our_unpack)
            if packed is not None and recipe is not None:
                self._found(packed.managed, recipe, is_to_go=one.is_to_go)
            if packed is None or recipe is not None or not one.tries:
                waiting.remove(one)

    def _found(self, managed: ManagedStorage, recipe: Recipe, *, is_to_go: bool) -> bool:
        if any(operand.managed is managed for operand in recipe.operands):
            return False
        proof = self._proof(managed, recipe)
        if proof is None:
            return False
        if is_to_go:
            return managed.drop(recipe)
        inputs = [operand.managed for operand in recipe.operands]
        assert self._steps is not None, "who else looks"
        self._steps.can_be_rebuilt(managed, recipe.name, inputs, proof.compute_ns, proof.extra_bytes)
        return True

    # See [Note: Proven once].

    def _proof(self, managed: ManagedStorage, recipe: Recipe) -> Proof | None:
        if recipe.signature not in self._proofs:
            try:
                proof = self._prove(managed, recipe)
            except torch.OutOfMemoryError:
                return None  # another time
            except VdnnError as error:
                logger.warning("vdnn: %s It is not rebuilt.", error)
                proof = None
            self._proofs[recipe.signature] = proof
        return self._proofs[recipe.signature]

    def _prove(self, managed: ManagedStorage, recipe: Recipe) -> Proof | None:
        gauges = None if self._steps is None else self._steps.gauges
        trial = _Trial(managed, recipe, gauges)
        made = trial.run()
        if managed.transport.fake:
            return trial.proof
        source = managed.source_storage
        if source is None or not _same_bytes(source, made.untyped_storage()):
            logger.warning("vdnn: %s does not come out bit for bit the same here: it is not rebuilt.", recipe.name)
            return None
        if gauges is not None:
            trial.run()  # the first may have loaded and chosen kernels
        return trial.proof


class _Trial:
    """A rebuild outside of any plan, and what it costs."""

    def __init__(self, managed: ManagedStorage, recipe: Recipe, gauges: Gauges | None) -> None:
        self._managed = managed
        self._recipe = recipe
        self._gauges = gauges
        self._stand_ins: list[torch.Tensor] = []
        self.proof = Proof(0, 0)

    def run(self) -> torch.Tensor:
        gauges, transport = self._gauges, self._managed.transport
        if gauges is None:
            return self._recipe.rebuild(self._operand)
        with gauges.unnoticed():
            self._begin()
            made = self._recipe.rebuild(self._operand)
            end = gauges.mark(transport.current_stream())
            extra_bytes = gauges.take_peaks()[0] - self._before_bytes
            self.proof = Proof(gauges.ns_between(self._begin_mark, end), max(extra_bytes, self._managed.nbytes))
        return made

    def _begin(self) -> None:
        gauges = self._gauges
        if gauges is not None:
            gauges.take_peaks()
            self._before_bytes = gauges.allocated_bytes()
            self._begin_mark = gauges.mark(self._managed.transport.current_stream())

    def _operand(self, packed: Any) -> torch.Tensor:
        """All are asked for before anything is computed: what that costs is no part of it."""
        view: PackedView = packed
        if view.managed.transport.fake:
            dtype, size, stride = view.geometry
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            self._stand_ins.append(tensor)  # in a step the operand stays, whoever has read it
        else:
            tensor = view.unpack()
        self._begin()
        return tensor


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    if one.nbytes() != other.nbytes():
        return False
    with torch.no_grad():
        first, second = (torch.empty(0, dtype=torch.uint8, device=storage.device) for storage in (one, other))
        first.set_(one)
        second.set_(other)
        return torch.equal(first, second)
