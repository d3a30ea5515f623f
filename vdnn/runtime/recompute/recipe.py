"""How to make a saved tensor again: steps in order, and the values that they begin with.

A recipe owns what it reads and nothing else: saved tensors that stay are held as they were kept, managed ones through
their packed views, leaves themselves. It holds no node of the graph and not the tensor that it makes, so that a graph
that dies frees all of it at once.

[Note: What comes out] The tensor that was packed, or where that was a view of more (`tensor._base`), the whole that it
was a view of: in either case a tensor that begins its storage and fills it, with the size and strides of the original,
so that its storage is byte for byte the storage that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.recompute.backend_flags import Flags
from vdnn.runtime.recompute.layouts import lies_as_before, refuse_unknown
from vdnn.runtime.recompute.node_notes import Packed
from vdnn.runtime.recompute.operation import Call, Operation
from vdnn.runtime.recompute.surroundings import run_under
from vdnn.runtime.storage.geometry import Geometry
from vdnn.runtime.storage.kept import KeptTensor, kept_tensor
from vdnn.runtime.storage.packed_view import PackedView

Unpack = Callable[[Packed], torch.Tensor]


class Leaf(NamedTuple):
    """A leaf that no node saved, the version that was read, and in which storage (its native address)."""

    tensor: torch.Tensor
    version: int
    storage: int


class Constant(NamedTuple):
    """A Python number in a tensor's place; without data, a tensor of no dimension."""

    value: bool | int | float | complex | torch.Tensor


Given = PackedView | KeptTensor | Leaf | Constant


class Step(NamedTuple):
    """One operation. `inputs` and `dying` are places among the values: first the given ones, then a step's each;
    an input of -1 is None. What is dying has had its last reader."""

    operation: Operation
    call: Call
    inputs: tuple[int, ...]
    dying: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Made by find_recipe. `operands` are the managed saves among what it reads, in the order in which they are asked
    for; `operand_depths` counts the operations from each of them to the result, on the longest way and without views,
    and `depth` those of the longest chain of all. `flags` are torch's settings under which its operations ran."""

    is_exact: ClassVar[bool] = True
    is_exact_in_bytes: ClassVar[bool] = True
    name: str
    signature: Hashable
    operands: tuple[PackedView, ...]
    operand_depths: tuple[int, ...]
    depth: int
    is_cheap: bool
    given: tuple[Given, ...]
    steps: tuple[Step, ...]
    geometry: Geometry
    flags: Flags

    @property
    def operation_names(self) -> tuple[str, ...]:
        """In the order in which they are done."""
        return tuple(step.operation.name for step in self.steps)

    def rebuild(self, unpack: Unpack) -> torch.Tensor:
        """The tensor, bit for bit, on the current stream. See [Note: What comes out].

        Every managed operand is asked for once, before anything is computed; memory of what lies between is let go
        of as soon as its last reader is done. Raises what `unpack` raises, VdnnError when an operand that stayed
        on the device is no longer what it was, and UnknownLayoutError.
        """
        values: list[Any] = [self._value(given, unpack) for given in self.given]
        return run_under(self.flags, partial(self._run, values))

    def _run(self, values: list[Any]) -> torch.Tensor:
        lie_as_before = [True] * len(values)
        for step in self.steps:
            inputs = [None if place < 0 else values[place] for place in step.inputs]
            are_known = all(lie_as_before[place] for place in step.inputs if place >= 0)
            refuse_unknown(step.operation, step.call, are_known)
            for place in step.dying:
                values[place] = None
            made = self._done(step, inputs)
            lie_as_before.append(lies_as_before(step.operation, inputs, made, are_known))
            values.append(made)
            del inputs, made
        return _shaped(values[-1], self.geometry)

    def _value(self, given: Given, unpack: Unpack) -> Any:
        if isinstance(given, PackedView):
            return unpack(given)
        if isinstance(given, Constant):
            return given.value
        tensor, version = given[0], given[1]
        if tensor._version != version:
            raise OperandModifiedError(
                recomputed="a tensor",
                recipe=self.name,
                operand=f"{tensor.type()} {list(tensor.shape)}",
                found=tensor._version,
                expected=version,
            )
        if not isinstance(given, Leaf):
            return kept_tensor(given)
        storage = tensor.untyped_storage()
        if storage._cdata != given.storage or storage.nbytes() < tensor.nbytes:
            raise VdnnError(
                f"cannot rebuild a tensor by {self.name}: the parameter of {tuple(tensor.shape)} that it needs has "
                "been given other memory since, or none (as sharded training does). Run vdnn.offload without recompute."
            )
        return tensor

    def _done(self, step: Step, inputs: Sequence[Any]) -> torch.Tensor:
        call = step.call
        try:
            made = step.operation.run(call, *inputs)
        except RuntimeError as error:
            raise VdnnError(f"cannot rebuild a tensor by {self.name}: {step.operation.name} raised: {error}") from error
        if made.shape != call.shape:
            raise VdnnError(
                f"cannot rebuild a tensor by {self.name}: {step.operation.name} made {tuple(made.shape)}, where it had "
                f"made {tuple(call.shape)}. This is a fault of vdnn's recipe."
            )
        if made.dtype is call.dtype:
            return made
        if not step.operation.may_be_in_place:
            raise VdnnError(
                f"cannot rebuild a tensor by {self.name}: {step.operation.name} made {made.dtype}, where it had made "
                f"{call.dtype}. This is a fault of vdnn's recipe."
            )
        # What was written in place kept its dtype, whatever was computed.
        return made.to(call.dtype)


def _shaped(made: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """With these strides, alone in a storage of its own."""
    dtype, size, stride = geometry
    if made.dtype is not dtype or made.shape != size:
        raise VdnnError(f"a recipe made {made.dtype} {tuple(made.shape)} instead of {dtype} {tuple(size)}.")
    if made.stride() == stride and not made.storage_offset() and made.untyped_storage().nbytes() == made.nbytes:
        return made
    return torch.empty_strided(size, stride, dtype=dtype, device=made.device).copy_(made)
