"""Gives the norms of a rehearsal the statistics that CUDA's kernels save.

The CPU's layer norm and batch norm of bfloat16 have statistics in bfloat16, CUDA's have them in float32. Only CUDA has
a fused RMS norm: here it is a layer norm without a bias, which reads and writes as much, and saves one statistic in
place of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from vdnn.runtime.rehearsal.cuda_autocast import as_float32, below_autocast, listed_for_cuda

_HALVES = (torch.float16, torch.bfloat16)
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_LAYER_NORM = torch.ops.aten.native_layer_norm.default


class NormStatistics:
    """`shaped()` is called with the results of each operation below autograd."""

    def __init__(self) -> None:
        self._is_rms = False

    def rms_norm(
        self,
        func: Any,
        input: torch.Tensor,
        normalized_shape: Any,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        """`func` is torch's. It runs by itself where CUDA has no fused kernel."""
        if torch.is_autocast_enabled("cpu") and "aten::rms_norm" in listed_for_cuda():
            input, weight = as_float32((input, weight))
        has_two_dtypes = weight is not None and weight.dtype is not input.dtype
        if not isinstance(input, FakeTensor) or not input.is_floating_point() or has_two_dtypes:
            return func(input, normalized_shape, weight, eps)
        self._is_rms = True
        try:
            least = torch.finfo(input.dtype).eps if eps is None else eps
            return below_autocast(functional.layer_norm)(input, normalized_shape, weight, None, least)
        finally:
            self._is_rms = False

    def shaped(self, func: Any, args: tuple[Any, ...], out: Any) -> Any:
        """The results as CUDA has them."""
        if func is _BATCH_NORM and args[0].dtype in _HALVES:
            return out[0], *(torch.empty_like(one, dtype=torch.float32) for one in out[1:])
        if func is not _LAYER_NORM or not (self._is_rms or args[0].dtype in _HALVES):
            return out
        made, mean, inverse = out
        if inverse.dtype in _HALVES:
            inverse = torch.empty_like(inverse, dtype=torch.float32)
            mean = inverse if self._is_rms else torch.empty_like(mean, dtype=torch.float32)
        return made, inverse if self._is_rms else mean, inverse
