"""The key of a recipe without its sizes, by which the outcome of a trial holds for tensors of other sizes.

Only recipes of operations that work on each number or each row by itself have one (`Operation.is_by_row`). Dtypes,
scalars, facts, settings and structure stay in the key, and so does everything about a shape that chooses code and not
the amount of work: the number of dimensions, which of them are 0 or 1 (they broadcast), the order of the strides,
gaps and overlaps between elements, and whether offsets need more than 32 bits. See docs/decisions/0082.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from vdnn.runtime.recompute.backend_flags import Flags
from vdnn.runtime.recompute.given import Constant, Given, geometry_of
from vdnn.runtime.recompute.operation import Operation, Step
from vdnn.runtime.recompute.recipe import Signature
from vdnn.runtime.storage.facts import Geometry

_LARGE = 1 << 31  # elements


def shapeless_signature(
    steps: tuple[Step, ...], given: Sequence[Given], geometry: Geometry, flags: Flags
) -> Signature | None:
    """The key; None if the recipe has an operation for which sizes count."""
    if not all(step.operation.is_by_row for step in steps):
        return None
    chain = tuple(
        (
            step.operation.name,
            _scalars_of(step.operation, step.call.scalars),
            step.call.dtype,
            _class_of(step.call.shape),
            step.call.device,
            step.call.output_nr,
            step.inputs,
        )
        for step in steps
    )
    return Signature(chain, tuple(_given(one) for one in given), _geometry(geometry), flags)


def _scalars_of(operation: Operation, scalars: tuple[object, ...]) -> tuple[object, ...]:
    """The scalars that are not sizes, and the facts of the call, which follow them."""
    if not operation.sizes:
        return scalars
    names, rest = operation.scalars, scalars[len(operation.scalars) :]
    return *(None if name in operation.sizes else one for name, one in zip(names, scalars, strict=False)), *rest


def _given(given: Given) -> Hashable:
    if not isinstance(given, Constant):
        return _geometry(geometry_of(given))
    value = given.value
    if isinstance(value, torch.Tensor):
        return _geometry((value.dtype, value.shape, value.stride()))
    return type(value), repr(value)


def _geometry(geometry: Geometry) -> Hashable:
    dtype, size, stride = geometry
    return dtype, _class_of(size), _layout_of(size, stride)


def _class_of(size: Sequence[int]) -> Hashable:
    return tuple(min(one, 2) for one in size), math.prod(size) >= _LARGE


def _layout_of(size: Sequence[int], stride: Sequence[int]) -> Hashable:
    """The dimensions from the outermost to the innermost in memory; for each, if it repeats its elements, lies densely
    around the inner ones, or leaves gaps."""
    inner_first = sorted(
        (index for index in range(len(size)) if size[index] > 1), key=lambda index: (stride[index], -index)
    )
    dense, found = 1, []
    for index in inner_first:
        one = stride[index]
        found.append((index, "repeats" if not one else "dense" if one == dense else "gaps"))
        dense = one * size[index]
    return tuple(found)
