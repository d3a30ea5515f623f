"""The class of an operation, by which a hardware profile knows how much of the card's peak it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# Tensor cores multiply channels by eights.
_FEW_CHANNELS = 8
_DIMENSIONS = 4  # of a batch of images
_NORMALIZATIONS = frozenset(
    {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"}
)


def compute_classes(name: str, args: tuple[Any, ...]) -> tuple[str, ...]:
    """The classes of an operation that multiplies matrices, convolves or attends, the narrowest first."""
    if name in _CONVOLUTIONS:
        return (*_convolution_classes(_CONVOLUTIONS[name](*args)), "convolution")
    if "convolution" in name:
        return ("convolution",)
    return ("attention",) if "attention" in name else ("product",)


def bandwidth_class(name: str) -> str:
    """The class of an operation by its use of memory."""
    if "batch_norm" in name:
        return "batch_normalization"
    return "normalization" if name in _NORMALIZATIONS else "elementwise"


def converted_maps(name: str, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
    """The maps whose layout cuDNN changes for a convolution on tensor cores: none if its input is channels last, or if
    it is depthwise, because torch has kernels without tensor cores for that (DepthwiseConv2d.cu).

    A backward pass is two calls of cuDNN, each of which converts the gradient of the output for itself.
    """
    if name not in _CONVOLUTIONS:
        return []
    found = _CONVOLUTIONS[name](*args)
    x = found.x
    if x.dim() != _DIMENSIONS or _is_channels_last(x) or _is_depthwise(found):
        return []
    if name != "convolution_backward":
        return [x, out]
    gradient, (of_input, of_weight) = args[0], args[-1][:2]
    return [gradient, out[0]] * of_input + [gradient, x] * of_weight


def kernel_count(name: str, args: tuple[Any, ...]) -> int:
    """The number of kernels with arithmetic: two gradients, of the input and of the weight, take one each."""
    return max(1, sum(args[-1][:2])) if name == "convolution_backward" else 1


def inner_size(name: str, args: tuple[Any, ...]) -> int | None:
    """The size of the dimension that a product of matrices adds up, or None for another operation."""
    place = _LEFT.get(name)
    return None if place is None else max(1, int(args[place].shape[-1]))


def padded_share(name: str, args: tuple[Any, ...]) -> float:
    """How many times the requested products tensor cores compute: a kernel computes whole tiles of its result.

    Convolutions in groups, and those of few channels, have classes of their own.
    """
    if name in _CONVOLUTIONS:
        found = _CONVOLUTIONS[name](*args)
        outputs, inputs = map(int, found.weight.shape[:2])
        if found.groups > 1 or inputs < _FEW_CHANNELS:
            return 1.0
        if name != "convolution_backward":
            return _padding(outputs)
        of_input, of_weight = args[-1][:2]
        columns = int(found.weight[0].numel())
        shares = [_padding(inputs)] * of_input + [_padding(outputs) * _padding(columns)] * of_weight
        return sum(shares) / max(1, len(shares))
    left = _LEFT.get(name)
    return 1.0 if left is None else _padding(args[left].shape[-2]) * _padding(args[left + 1].shape[-1])


def _padding(size: int) -> float:
    return -(-size // _TILE) * _TILE / max(1, size)


# The side of cuBLAS's smallest tile on tensor cores (NVIDIA, Matrix Multiplication Background User's Guide).
_TILE = 64
# The place of the left matrix. The right one is next.
_LEFT = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


class _Convolution(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    stride: Sequence[int]
    groups: int


def _of_forward(*args: Any) -> _Convolution:
    # aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return _Convolution(args[0], args[1], args[3], args[8])


def _of_backward(*args: Any) -> _Convolution:
    # aten::convolution_backward(gradient, input, weight, bias_sizes, stride, ..., groups, output_mask)
    return _Convolution(args[1], args[2], args[4], args[9])


# With stride 1.
_BY_KERNEL: dict[tuple[int, ...], tuple[str, ...]] = {(3, 3): ("convolution_3x3",), (1, 1): ("convolution_1x1",)}
_CONVOLUTIONS = {"convolution": _of_forward, "_convolution": _of_forward, "convolution_backward": _of_backward}


def _convolution_classes(found: _Convolution) -> tuple[str, ...]:
    channels = found.x.shape[1]
    if found.groups > 1:
        by_depth = ("convolution_depthwise",) if _is_depthwise(found) else ()
        return (*by_depth, "convolution_grouped")
    is_last = _is_channels_last(found.x)
    if channels < _FEW_CHANNELS:
        return (*(("convolution_few_channels_last",) if is_last else ()), "convolution_few_channels")
    by_kernel = _BY_KERNEL.get(tuple(found.weight.shape[2:]), ()) if set(found.stride) == {1} else ()
    return ("convolution_channels_last", *by_kernel) if is_last else by_kernel


def _is_depthwise(found: _Convolution) -> bool:
    return 1 < found.groups == found.x.shape[1]


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == _DIMENSIONS and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
