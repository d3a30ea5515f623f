"""What a node saved, as it lies there: read without unpacking, and only where our own hooks packed it.

The plain attributes (`_saved_self`) would unpack: under a checkpoint that runs the region's forward again, in the
middle of a forward. The raw ones hand over what a pack hook returned, together with the unpack hook that belongs to it.
Torch 2.8 has raw ones that hand over nothing: there less can be recomputed, and more is kept or moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn.runtime.recompute.node_notes import Packed
from vdnn.runtime.recompute.operation import Node
from vdnn.runtime.recompute.recipe import Unpack

# Under which a node saves its own outputs, by output.
_RESULTS = (("_raw_saved_result", "_raw_saved_output"), ("_raw_saved_result1",), ("_raw_saved_result2",))
Number = bool | int | float | complex
_OF_NUMBERS = (torch.bool, torch.int64, torch.float64, torch.complex128)  # as torch wraps Python's
_UNSIGNED_FROM = 1 << 63
_IS_READABLE = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def saved_in(node: Node, slot: str, unpack: Unpack) -> Packed | None:
    """What our pack hook returned for this slot; None if it is empty, given up, or another's."""
    return _read(node, "_raw_saved_" + slot, unpack)


def number_in(node: Node, slot: str) -> Number | torch.Tensor | None:
    """A Python number that the operation was given in a tensor's place: autograd saves it without asking any hook."""
    raw = _raw(node, "_raw_saved_" + slot)
    held = None if raw is None or raw.unpack_hook is not None else raw.data
    if not isinstance(held, torch.Tensor) or held.dim() or held.device.type != "cpu" or held._version:
        return None
    if held.dtype not in _OF_NUMBERS:
        return None
    if type(held) is FakeTensor:
        return held  # without data there are no bits
    with (
        no_dispatch(),
        torch._C.DisableTorchFunction(),
    ):  # nobody's modes: it is a number, whatever they make of tensors
        number: Number = held.item()
    return number


def is_empty(node: Node, slot: str, beside: str = "input") -> bool:
    """Of a slot that the node fills if there is such a tensor. After a backward all slots are empty: then `beside`,
    which is always filled, is empty too, and nothing is known."""
    raw, filled = _raw(node, "_raw_saved_" + slot), _raw(node, "_raw_saved_" + beside)
    return raw is not None and raw.data is None and filled is not None and filled.data is not None


def saved_output(node: Node, output_nr: int, unpack: Unpack) -> Packed | None:
    """An output that the node itself saved."""
    if output_nr >= len(_RESULTS) or node.name().count("Backward") > 1:
        # A node of a double backward (TanhBackwardBackward0, SoftmaxBackwardDataBackward0) saves what a forward put
        # out: its own input.
        return None
    for name in _RESULTS[output_nr]:
        found = _read(node, name, unpack)
        if found is not None:
            return found
    return None


def scalars_of(node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """In that order; None if the node has not all of them."""
    try:
        return tuple(_signed(getattr(node, "_saved_" + name)) for name in names)
    except (AttributeError, RuntimeError):
        return None


def _raw(node: Node, name: str) -> Any:
    """None where the node has no such slot, or torch does not say what is in it."""
    return getattr(node, name, None) if _IS_READABLE else None


def _read(node: Node, name: str, unpack: Unpack) -> Packed | None:
    raw = _raw(node, name)
    if raw is None:
        return None
    data = raw.data
    if data is None or raw.unpack_hook != unpack:
        return None
    found: Packed = data
    return found


def _signed(value: Any) -> Any:
    """Negative numbers are handed out as unsigned ones."""
    if type(value) is int:
        return value if value < _UNSIGNED_FROM else value - (_UNSIGNED_FROM << 1)
    if isinstance(value, (tuple, list)):
        return tuple(_signed(one) for one in value)
    return value
