"""A recipe: the steps that recompute a saved tensor, and the values that they read.

A recipe owns only its operands: kept saves as they were kept, managed ones through their packed views, and leaves. It
holds neither a node of the graph nor the tensor that it makes, so a graph that is freed frees everything at once.

[Note: Result of a recipe] The result is the tensor that was packed, or the tensor that it was a view of
(`tensor._base`). Either starts its storage and fills it, with the size and strides of the original. So the storage of
the result is byte for byte the storage that was saved.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.errors import VdnnError
from vdnn.runtime.recompute.backend_flags import Flags
from vdnn.runtime.recompute.compiled_run import Fetch, Run, fetch_for
from vdnn.runtime.recompute.given import Given, Unpack
from vdnn.runtime.recompute.operation import Cost, Step
from vdnn.runtime.recompute.surroundings import run_under
from vdnn.runtime.storage.discarded import Recomputable
from vdnn.runtime.storage.facts import Geometry
from vdnn.runtime.storage.packed_view import PackedView


class Signature:
    """The facts for which a trial of a recipe holds. They are nested deeply, so their hash is computed once."""

    __slots__ = ("_facts", "_hash")

    def __init__(self, *facts: Hashable) -> None:
        self._facts = facts
        self._hash = hash(facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._hash == other._hash and self._facts == other._facts

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Everything in a recipe that does not depend on whose values it reads.

    `operand_depths` counts the operations on the longest path from each managed operand to the result, without views;
    `depth` is the length of the longest chain. `flags` are the settings of torch under which its operations ran.
    `shapeless`: the signature without sizes, None if a trial holds for its sizes alone. `run` has the steps as code.
    """

    name: str
    signature: Hashable
    shapeless: Hashable | None
    operand_depths: tuple[int, ...]
    depth: int
    is_cheap: bool
    steps: tuple[Step, ...]
    geometry: Geometry
    flags: Flags
    run: Run


@dataclass(slots=True, eq=False)  # a frozen one takes four times as long to make
class Recipe:
    """Made by find_recipe, and never changed. `operands` are the managed saves among what is `given`, in the order in
    which they are unpacked, and `light_operands` those that the native gate moves. `rounding_nodes`: the sequence
    numbers of the nodes of operations that round once, and `sensitive_nodes` of all others that may run again. `fetch`
    fetches the given values, if they are known."""

    is_exact: ClassVar[bool] = True
    is_exact_in_bytes: ClassVar[bool] = True
    template: Template
    operands: tuple[PackedView, ...]
    given: tuple[Given, ...]
    sensitive_nodes: tuple[int, ...]
    rounding_nodes: tuple[int, ...]
    light_operands: tuple[LightSave, ...]
    fetch: Fetch | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.sensitive_nodes + self.rounding_nodes

    @property
    def name(self) -> str:
        return self.template.name

    @property
    def signature(self) -> Hashable:
        return self.template.signature

    @property
    def shapeless(self) -> Hashable | None:
        return self.template.shapeless

    @property
    def is_cheap(self) -> bool:
        return self.template.is_cheap

    @property
    def geometry(self) -> Geometry:
        return self.template.geometry

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.template.steps

    @property
    def num_unpacked(self) -> int:
        """The number of operands that a recompute unpacks."""
        return sum(isinstance(given, (PackedView, KeptSave, LightSave)) for given in self.given)

    @property
    def read_saves(self) -> tuple[PackedView | KeptSave, ...]:
        """The saves that it reads, in the order in which they are unpacked."""
        return tuple(given for given in self.given if isinstance(given, (PackedView, KeptSave)))

    @property
    def sources(self) -> tuple[Recomputable | LightSave, ...]:
        """The storages of the operands that may have been discarded, in the order in which they are unpacked."""
        return tuple(
            given.managed if isinstance(given, PackedView) else given
            for given in self.given
            if isinstance(given, (PackedView, LightSave))
        )

    @property
    def result_bytes(self) -> int:
        """The bytes of the results of all operations."""
        calls = [step.call for step in self.steps if step.operation.cost is not Cost.FREE]
        return sum(math.prod(call.shape) * call.dtype.itemsize for call in calls)

    def recompute(self, unpack: Unpack) -> torch.Tensor:
        """Compute the tensor, bit for bit, on the current stream. See [Note: Result of a recipe].

        Every managed operand is unpacked once, before anything is computed. Intermediate values are released after
        their last reader. Raises what `unpack` raises, VdnnError if an operand on the device was modified, and
        UnknownLayoutError.
        """
        template, given = self.template, self.given
        values = (self.fetch or fetch_for(given))(given, unpack, template.name)
        made = run_under(template.flags, template.run, values, template.steps, template.name)
        return _with_geometry(made, template.geometry)


def _with_geometry(made: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The tensor, or a copy, that has these strides and fills its storage."""
    dtype, size, stride = geometry
    if made.dtype is not dtype or made.shape != size:
        raise VdnnError(
            f"a recipe made {made.dtype} {tuple(made.shape)}, expected {dtype} {tuple(size)}. This is a bug in vdnn."
        )
    if made.stride() == stride and not made.storage_offset() and made.untyped_storage().nbytes() == made.nbytes:
        return made
    return torch.empty_strided(size, stride, dtype=dtype, device=made.device).copy_(made)
