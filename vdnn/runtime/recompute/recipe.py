"""A recipe: the steps that recompute a saved tensor, and the values that they read.

A recipe owns what it reads and nothing else: kept saves as they were kept, managed ones through their packed views, and
leaves. It holds neither a node of the graph nor the tensor that it makes, so a graph that is freed frees everything at
once.

[Note: Result of a recipe] The result is the tensor that was packed, or the tensor that it was a view of
(`tensor._base`). Either starts its storage and fills it, with the size and strides of the original. So the storage of
the result is byte for byte the storage that was saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.recompute.backend_flags import Flags
from vdnn.runtime.recompute.layouts import has_original_strides, refuse_unknown_strides
from vdnn.runtime.recompute.node_notes import Packed, current_form
from vdnn.runtime.recompute.operation import Call, Cost, Operation
from vdnn.runtime.recompute.surroundings import run_under
from vdnn.runtime.storage.facts import Geometry
from vdnn.runtime.storage.kept import KeptTensor, kept_tensor
from vdnn.runtime.storage.packed_view import PackedView

Unpack = Callable[[Packed], torch.Tensor]


class Leaf(NamedTuple):
    """A leaf that no node saved, the version that was read, and the native address of its storage."""

    tensor: torch.Tensor
    version: int
    storage: int


class Constant(NamedTuple):
    """A Python number that was given for a tensor. Without data it is a tensor with no dimensions."""

    value: bool | int | float | complex | torch.Tensor


Given = PackedView | KeptSave | LightSave | KeptTensor | Leaf | Constant


def tensor_read(given: KeptSave | KeptTensor | Leaf) -> tuple[torch.Tensor, int]:
    """The tensor that a recipe reads where it is, and the version that it has to have."""
    return (given.tensor, given.version) if isinstance(given, KeptSave) else (given[0], given[1])


def geometry_of(given: PackedView | KeptSave | LightSave | KeptTensor | Leaf) -> Geometry:
    if isinstance(given, (PackedView, LightSave)):
        return given.geometry
    tensor = tensor_read(given)[0]
    return tensor.dtype, tensor.shape, tensor.stride()


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


class Step(NamedTuple):
    """One operation. `inputs` and `dying` are indices of values: first the given ones, then one for each step. An input
    of -1 is None. A value in `dying` is not read by later steps."""

    operation: Operation
    call: Call
    inputs: tuple[int, ...]
    dying: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Made by find_recipe. `operands` are the managed saves that it reads, in the order in which they are unpacked.
    `operand_depths` counts the operations on the longest path from each operand to the result, without views; `depth`
    is the length of the longest chain. `flags` are the settings of torch under which its operations ran. `nodes`:
    the sequence numbers of the nodes whose operations may be among them. `shapeless`: the signature without sizes, None
    if they count for what a trial proves."""

    is_exact: ClassVar[bool] = True
    is_exact_in_bytes: ClassVar[bool] = True
    name: str
    signature: Hashable
    shapeless: Hashable | None
    operands: tuple[PackedView, ...]
    operand_depths: tuple[int, ...]
    depth: int
    is_cheap: bool
    given: tuple[Given, ...]
    steps: tuple[Step, ...]
    geometry: Geometry
    flags: Flags
    nodes: tuple[int, ...]

    @property
    def operation_names(self) -> tuple[str, ...]:
        """The names, in the order in which the operations run."""
        return tuple(step.operation.name for step in self.steps)

    @property
    def num_unpacked(self) -> int:
        """The number of operands that a recompute unpacks."""
        return sum(isinstance(given, (PackedView, KeptSave, LightSave)) for given in self.given)

    @property
    def light_operands(self) -> tuple[LightSave, ...]:
        return tuple(given for given in self.given if isinstance(given, LightSave))

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
        values: list[Any] = [self._value(given, unpack) for given in self.given]
        return run_under(self.flags, partial(self._run, values))

    def _run(self, values: list[Any]) -> torch.Tensor:
        strides_match = [True] * len(values)
        for step in self.steps:
            inputs = [None if index < 0 else values[index] for index in step.inputs]
            inputs_match = all(strides_match[index] for index in step.inputs if index >= 0)
            refuse_unknown_strides(step.operation, step.call, inputs_match)
            for index in step.dying:
                values[index] = None
            made = self._run_step(step, inputs)
            strides_match.append(has_original_strides(step.operation, inputs, made, inputs_match))
            values.append(made)
            del inputs, made
        return _with_geometry(values[-1], self.geometry)

    def _value(self, given: Given, unpack: Unpack) -> Any:
        if isinstance(given, PackedView):
            return unpack(given)
        if isinstance(given, Constant):
            return given.value
        if isinstance(given, (KeptSave, LightSave)):
            now = current_form(given)
            if now is not given or isinstance(now, LightSave):
                return unpack(now)
        tensor, version = tensor_read(given)
        if tensor._version != version:
            raise OperandModifiedError(
                recomputed="a tensor",
                recipe=self.name,
                operand=f"{tensor.type()} {list(tensor.shape)}",
                found=tensor._version,
                expected=version,
            )
        if isinstance(given, KeptSave):
            return unpack(given)
        if not isinstance(given, Leaf):
            return kept_tensor(given)
        storage = tensor.untyped_storage()
        if storage._cdata != given.storage or storage.nbytes() < tensor.nbytes:
            raise VdnnError(
                f"cannot recompute a tensor by {self.name}: the parameter of shape {tuple(tensor.shape)} that it reads "
                "has other memory than in the forward pass, or none (as in sharded training). Run "
                "vdnn.offload(recompute=False)."
            )
        return tensor

    def _run_step(self, step: Step, inputs: Sequence[Any]) -> torch.Tensor:
        call = step.call
        try:
            made = step.operation.run(call, *inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise VdnnError(
                f"cannot recompute a tensor by {self.name}: {step.operation.name} raised: {error}"
            ) from error
        if made.shape != call.shape:
            raise VdnnError(
                f"cannot recompute a tensor by {self.name}: {step.operation.name} made shape {tuple(made.shape)}, "
                f"expected {tuple(call.shape)}. This is a bug in vdnn's recipe."
            )
        if made.dtype is call.dtype:
            return made
        if not step.operation.may_be_in_place:
            raise VdnnError(
                f"cannot recompute a tensor by {self.name}: {step.operation.name} made {made.dtype}, expected "
                f"{call.dtype}. This is a bug in vdnn's recipe."
            )
        # An operation in place keeps the dtype of the tensor that it overwrites.
        return made.to(call.dtype)


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
