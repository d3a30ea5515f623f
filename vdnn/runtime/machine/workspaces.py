"""The memory that libraries take on a GPU for the time of one operation, as an upper figure from shapes.

cuDNN's tensor cores convolve maps that are channels last. Maps in torch's usual layout are converted into a workspace
first, and results from one: pytorch/pytorch#81940 shows the kernels. A forward call so holds a second copy of input and
output, a call for the gradient of the input one of both gradients, and a call for the gradient of the weight one of the
input and of the output's gradient; the two calls of a backward follow each other. On an H200, a plain step of VGG-16
(batch 128) took 10.06 GiB, and 8.83 whatever moved (docs/benchmarks.md). Its tensors take 9.78 and 5.70 GiB, and with
these workspaces 10.06 and 8.84.

A profile may have measured figures of calls (`workspaces`), which come first: benchmarks/on_a_gpu/workspace_table.py
measures them. Not known, and left out: convolutions in three dimensions, transposed ones, those of cards without a
figure of `layout_conversion`, and what other algorithms than those of tensor cores take, which torch chooses under
`torch.backends.cudnn.benchmark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vdnn.bytesize import format_bytes
from vdnn.hardware import HardwareProfile
from vdnn.hardware.operation_classes import LAYOUT_CONVERSION
from vdnn.runtime.machine.operation_class import converted_maps
from vdnn.runtime.machine.roofline import runs_on_tensor_cores

# Tensor cores take channels in blocks of 16 bytes.
_BLOCK_BYTES = 16
# An assumption: the partial sums of a weight's gradient. VGG-16's 8.83 GiB leave 3 to 13 MiB beside the maps.
_PARTIAL_SUMS = 16 << 20


@dataclass(frozen=True, slots=True)
class Workspace:
    """An upper figure of the memory that a library takes for one operation."""

    nbytes: int
    operation: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} of cuDNN in {self.operation}, {self.dtype} {list(self.shape)}"


def workspace_of(profile: HardwareProfile, func: Any, args: tuple[Any, ...], out: Any) -> Workspace | None:
    """The workspace of one call of an aten operation, or None if it needs none that is known. A figure that the profile
    has of the call comes first."""
    name = func._overloadpacket.__name__
    if profile.workspaces:
        nbytes = profile.workspaces.get(workspace_key(name, args))
        if nbytes is not None:
            return _measured(nbytes, name, args) if nbytes else None
    if "convolution" not in name or LAYOUT_CONVERSION not in profile.efficiency:
        return None
    maps = converted_maps(name, args, out)
    if not maps or not runs_on_tensor_cores(profile, name, args):
        return None
    # Each call converts two maps. The calls of a backward follow each other.
    nbytes = max(sum(map(_converted_bytes, maps[first : first + 2])) for first in range(0, len(maps), 2))
    if name == "convolution_backward":
        nbytes += _PARTIAL_SUMS
    return Workspace(nbytes, name, str(maps[0].dtype).removeprefix("torch."), tuple(maps[0].shape))


def workspace_key(name: str, args: tuple[Any, ...]) -> str:
    """Names a call by what a library chooses its algorithm from: dtype, shapes, layout, strides and the like."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    words = [name, *dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in tensors)]
    words += ["x".join(map(str, one.shape)) for one in tensors]
    if any(_is_channels_last(one) for one in tensors):
        words.append("channels_last")
    words += ["x".join(str(int(item)) for item in one) for one in args if isinstance(one, (list, tuple))]
    words += [str(int(one)) for one in args if isinstance(one, int)]
    return " ".join(words)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _measured(nbytes: int, name: str, args: tuple[Any, ...]) -> Workspace:
    first = next(one for one in args if isinstance(one, torch.Tensor))
    return Workspace(nbytes, name, str(first.dtype).removeprefix("torch."), tuple(first.shape))


def _converted_bytes(one: torch.Tensor) -> int:
    shape: Sequence[int] = one.shape
    block = _BLOCK_BYTES // one.itemsize
    return int(one.numel() // shape[1] * (-(-shape[1] // block) * block) * one.itemsize) if one.numel() else 0
