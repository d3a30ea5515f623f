"""Which values of a recompute lie as the originals did: what lies otherwise is not read by whom that concerns.

The graph does not say how a value between two operations lay. A copy may have been asked for another memory format, and
an operation in place keeps the strides of what it overwrites. The numbers at each index are the same either way, but an
operation that sums, or that has one code for vectors and another for what is left over, may give another last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.recompute.operation import Call, Cost, Layout, Operation


class UnknownLayoutError(VdnnError):
    """A recipe that cannot be followed, and need not be told of."""


def refuse_unknown(operation: Operation, call: Call, are_known: bool) -> None:
    """Raise UnknownLayoutError if the operation reads a value that may lie otherwise, and its bits depend on that."""
    if not are_known and _reads_layout(operation, call):
        raise UnknownLayoutError(f"{operation.name} would read a value of which is not known how it lay")


def lies_as_before(
    operation: Operation, inputs: Sequence[torch.Tensor | None], made: torch.Tensor, are_known: bool
) -> bool:
    """Whether `made` has the strides that the original had. `are_known`: all inputs have theirs."""
    if operation.layout is Layout.CONTIGUOUS:
        return True
    if not are_known:
        return False
    first = inputs[0] if inputs else None
    if first is None or operation.cost is Cost.FREE:
        return True
    if operation.layout is Layout.ASKED:
        return first.is_contiguous() and not _has_another_format(first)
    return not operation.may_be_in_place or first.shape != made.shape or _lie_alike(first, made)


def _reads_layout(operation: Operation, call: Call) -> bool:
    if operation.layout is not Layout.EXACT:
        return operation.layout is Layout.READ
    # A complex product is a sum, and a sum with a scaled operand may be rounded once or twice.
    return call.dtype.is_complex or (operation.scalars == ("alpha",) and call.scalars != (1,))


def _has_another_format(tensor: torch.Tensor) -> bool:
    """Whether a contiguous copy and one in channels last differ."""
    if tensor.dim() not in (4, 5):
        return False
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return not tensor.is_contiguous(memory_format=last)


def _lie_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    pairs = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size <= 1 or one == other for size, one, other in pairs)
