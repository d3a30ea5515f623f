"""The memory layout of a model's convolution weights: which one they have, and how to change it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.modules.conv import _ConvNd

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_NAMES = {4: "channels_last", 5: "channels_last_3d"}


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """Counts of the weights of convolutions with two or three dimensions. Weights of 1 x 1 kernels have both layouts at
    once and do not count as channels first."""

    total: int
    channels_first: int
    layout: str


def convolution_weights(model: torch.nn.Module) -> ConvolutionWeights | None:
    """The counts for `model`, or None if it has no such convolutions."""
    weights = [one.weight for one in model.modules() if isinstance(one, _ConvNd) and one.weight.dim() in _LAYOUTS]
    if not weights:
        return None
    first = [one for one in weights if not one.is_contiguous(memory_format=_LAYOUTS[one.dim()])]
    return ConvolutionWeights(len(weights), len(first), _NAMES[weights[0].dim()])


def to_channels_last(model: torch.nn.Module) -> None:
    """Stores the weights of convolutions channels last. Each stays the same object, so an optimizer keeps it."""
    for one in model.modules():
        if isinstance(one, _ConvNd) and one.weight.dim() in _LAYOUTS:
            weight = one.weight.detach()
            one.weight.data = weight.contiguous(memory_format=_LAYOUTS[weight.dim()])
