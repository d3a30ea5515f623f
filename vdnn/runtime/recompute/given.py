"""The values that a recipe reads: saves in the form in which a graph holds them, leaves, and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.recompute.node_notes import Packed
from vdnn.runtime.storage.facts import Geometry
from vdnn.runtime.storage.kept import KeptTensor
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


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a parameter whose memory is freed between its uses, as by FSDP2. Reading it ends the process."""
    return bool(tensor.untyped_storage().nbytes()) or not tensor.nbytes


def geometry_of(given: PackedView | KeptSave | LightSave | KeptTensor | Leaf) -> Geometry:
    if isinstance(given, (PackedView, LightSave)):
        return given.geometry
    tensor = tensor_read(given)[0]
    return tensor.dtype, tensor.shape, tensor.stride()
