"""Reads what a node saved without unpacking it, and only if our own hooks packed it.

The plain attributes (`_saved_self`) would unpack: under a checkpoint, that runs the region's forward again in the
middle of a forward. The raw attributes give what the pack hook returned and the unpack hook that belongs to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn._C import save_in_slot
from vdnn.runtime.recompute.given import Unpack
from vdnn.runtime.recompute.node_notes import Packed
from vdnn.runtime.recompute.operation import Node

# The attributes under which a node saves its own outputs, by output.
_RESULTS = (("_raw_saved_result", "_raw_saved_output"), ("_raw_saved_result1",), ("_raw_saved_result2",))
Number = bool | int | float | complex
_OF_NUMBERS = (torch.bool, torch.int64, torch.float64, torch.complex128)  # as torch wraps Python's
_UNSIGNED_FROM = 1 << 63


def saved_in(node: Node, slot: str, unpack: Unpack) -> Packed | None:
    """The return value of our pack hook for this slot; None if it is empty, released, or packed by another hook."""
    found: Packed | None = save_in_slot(node, "_raw_saved_" + slot, unpack)
    return found


def number_in(node: Node, slot: str) -> Number | torch.Tensor | None:
    """The Python number that the operation was given for a tensor. Autograd saves it without calling a hook."""
    raw = _raw(node, "_raw_saved_" + slot)
    held = None if raw is None or raw.unpack_hook is not None else raw.data
    if not isinstance(held, torch.Tensor) or held.dim() or held.device.type != "cpu" or held._version:
        return None
    if held.dtype not in _OF_NUMBERS:
        return None
    if type(held) is FakeTensor:
        return held  # its value cannot be read
    with (
        no_dispatch(),
        torch._C.DisableTorchFunction(),
    ):  # modes of the program must not see the read of a number
        number: Number = held.item()
    return number


def is_empty(node: Node, slot: str, beside: str = "input") -> bool:
    """True if the operation was not given the tensor of this slot. After a backward all slots are empty. Then `beside`,
    which a node always fills, is empty too, and the answer is False."""
    raw, filled = _raw(node, "_raw_saved_" + slot), _raw(node, "_raw_saved_" + beside)
    return raw is not None and raw.data is None and filled is not None and filled.data is not None


def saved_output(node: Node, output_nr: int, unpack: Unpack) -> Packed | None:
    """An output that the node itself saved."""
    if not may_save_output(node, output_nr):
        return None
    for name in _RESULTS[output_nr]:
        found: Packed | None = save_in_slot(node, name, unpack)
        if found is not None:
            return found
    return None


def may_save_output(node: Node, output_nr: int) -> bool:
    """True if nodes of this class save this output of theirs."""
    # A node of a double backward (TanhBackwardBackward0, SoftmaxBackwardDataBackward0) saves the output of a forward,
    # which is its own input.
    is_double = node.name().count("Backward") > 1
    return output_nr < len(_RESULTS) and not is_double and any(hasattr(type(node), one) for one in _RESULTS[output_nr])


def scalars_of(node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The scalars that the node saved, in the order of `names`; None if it lacks one."""
    try:
        return tuple(signed(getattr(node, "_saved_" + name)) for name in names)
    except (AttributeError, RuntimeError):
        return None


def _raw(node: Node, name: str) -> Any:
    """The raw slot; None if the node has no such slot."""
    return getattr(node, name, None)


def signed(value: Any) -> Any:
    """The value as a signed number: torch gives negative ones as unsigned."""
    if type(value) is int:
        return value if value < _UNSIGNED_FROM else value - (_UNSIGNED_FROM << 1)
    if isinstance(value, (tuple, list)):
        return tuple(signed(one) for one in value)
    return value
