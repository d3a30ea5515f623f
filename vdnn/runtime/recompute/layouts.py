"""Tracks which values of a recompute have the strides of the originals, and refuses operations whose bits need them.

The graph does not record the strides of a value between two operations. A copy may have asked for another memory
format, and an operation in place keeps the strides of the tensor that it overwrites. The numbers at each index are the
same either way. But an operation that sums, or whose vectorized code differs from its code for the remainder, may give
another last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.recompute.operation import ALPHA, Call, Cost, Layout, Operation


class UnknownLayoutError(VdnnError):
    """A recipe that cannot be followed. Not reported to the user."""


def may_change_strides(operation: Operation, *, has_first: bool) -> bool:
    """True if the result may have other strides than the original although the inputs have the strides of theirs.
    `has_first`: it has a first input."""
    if operation.layout is Layout.CONTIGUOUS or operation.cost is Cost.FREE or not has_first:
        return False
    return operation.layout is Layout.ASKED or operation.may_be_in_place


def has_original_strides(
    operation: Operation, inputs: Sequence[torch.Tensor | None], made: torch.Tensor, inputs_match: bool
) -> bool:
    """True if `made` is known to have the strides of the original. `inputs_match`: all inputs have."""
    if operation.layout is Layout.CONTIGUOUS:
        return True
    if not inputs_match:
        return False
    first = inputs[0] if inputs else None
    if first is None or operation.cost is Cost.FREE:
        return True
    if operation.layout is Layout.ASKED:
        return first.is_contiguous() and not _has_another_format(first)
    return not operation.may_be_in_place or first.shape != made.shape or _have_same_strides(first, made)


def reads_layout(operation: Operation, call: Call) -> bool:
    """True if the operation's bits may depend on the strides of its inputs."""
    if operation.layout is not Layout.EXACT:
        return operation.layout is Layout.READ
    # A complex product adds products; a sum with a scaled operand may be rounded once or twice.
    return call.dtype.is_complex or (operation.scalars == ALPHA and call.scalars != (1,))


def _has_another_format(tensor: torch.Tensor) -> bool:
    """True if a contiguous copy of the tensor and one in channels last have different strides."""
    if tensor.dim() not in (4, 5):
        return False
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return not tensor.is_contiguous(memory_format=last)


def _have_same_strides(first: torch.Tensor, second: torch.Tensor) -> bool:
    pairs = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size <= 1 or one == other for size, one, other in pairs)
