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
    """The maps whose layout cuDNN changes for a convolution on tensor cores: none if its input is channels last.

    A backward pass is two calls of cuDNN, each of which converts the gradient of the output for itself.
    """
    if name not in _CONVOLUTIONS:
        return []
    x = _CONVOLUTIONS[name](*args).x
    if x.dim() != _DIMENSIONS or _is_channels_last(x):
        return []
    if name != "convolution_backward":
        return [x, out]
    gradient, (of_input, of_weight) = args[0], args[-1][:2]
    return [gradient, out[0]] * of_input + [gradient, x] * of_weight


def kernel_count(name: str, args: tuple[Any, ...]) -> int:
    """The number of kernels with arithmetic: two gradients, of the input and of the weight, take one each."""
    return max(1, sum(args[-1][:2])) if name == "convolution_backward" else 1


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


_CONVOLUTIONS = {"convolution": _of_forward, "_convolution": _of_forward, "convolution_backward": _of_backward}


def _convolution_classes(found: _Convolution) -> tuple[str, ...]:
    channels = found.x.shape[1]
    if found.groups > 1:
        is_depthwise = found.groups == channels
        return ("convolution_depthwise", "convolution_grouped") if is_depthwise else ("convolution_grouped",)
    is_last = _is_channels_last(found.x)
    if channels < _FEW_CHANNELS:
        return (*(("convolution_few_channels_last",) if is_last else ()), "convolution_few_channels")
    is_3x3 = tuple(found.weight.shape[2:]) == (3, 3) and set(found.stride) == {1}
    by_kernel = ("convolution_3x3",) if is_3x3 else ()
    return ("convolution_channels_last", *by_kernel) if is_last else by_kernel


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == _DIMENSIONS and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
