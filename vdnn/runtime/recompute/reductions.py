"""Softmax, sums and means, pooling, upsampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from vdnn.runtime.recompute.operation import FIRST, Call, Layout, Operation, Table, unary

Tensor = torch.Tensor
_aten = torch.ops.aten


def _softmax(call: Call, input: Tensor) -> Tensor:
    # CUDA's kernels may read half precision and write single precision.
    return torch._softmax(input, call.scalars[0], input.dtype is not call.dtype)


def _log_softmax(call: Call, input: Tensor) -> Tensor:
    return torch._log_softmax(input, call.scalars[0], input.dtype is not call.dtype)


def _by_row(name: str, run: Callable[..., Tensor], *scalars: str, layout: Layout = Layout.READ) -> Operation:
    """An operation along given dimensions."""
    return Operation(name, run, FIRST, scalars, layout=layout, is_by_row=True)


def _pool(name: str, run: str, *scalars: str, output: int | None = None) -> Operation:
    function = getattr(torch._C._nn, run, None) or getattr(torch, run)

    def pooled(call: Call, input: Tensor) -> Tensor:
        found = function(input, *call.scalars)
        made: Tensor = found if output is None else found[output]
        return made

    found = unary(name, pooled, *scalars)
    return replace(found, layout=Layout.IGNORED) if "max" in name else found  # max pooling compares


def _adaptive(run: str) -> Operation:
    function = getattr(_aten, run)
    dims = int(run[-2])
    return unary("adaptive_avg_pool", lambda call, x: function(x, call.shape[-dims:]))


def _upsample(run: str, *scalars: str) -> Operation:
    function = getattr(_aten, run)
    layout = Layout.IGNORED if "nearest" in run else Layout.READ
    return Operation(run, lambda call, x: function(x, *call.scalars), FIRST, ("output_size", *scalars), layout=layout)


_MAX = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_AVG = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_SCALES = ("scales_d", "scales_h", "scales_w")

TABLE: Table = {
    "SoftmaxBackward0": _by_row("softmax", _softmax, "dim", layout=Layout.CONTIGUOUS),
    "LogSoftmaxBackward0": _by_row("log_softmax", _log_softmax, "dim", layout=Layout.CONTIGUOUS),
    "SafeSoftmaxBackward0": _by_row(
        "softmax", lambda call, x: _aten._safe_softmax(x, call.scalars[0], call.dtype), "dim"
    ),
    "MeanBackward0": Operation("mean", lambda call, x: x.mean(dtype=call.dtype), FIRST),
    "MeanBackward1": _by_row("mean", lambda call, x: x.mean(*call.scalars, dtype=call.dtype), "dim", "keepdim"),
    "SumBackward0": Operation("sum", lambda call, x: x.sum(dtype=call.dtype), FIRST),
    "SumBackward1": _by_row("sum", lambda call, x: x.sum(*call.scalars, dtype=call.dtype), "dim", "keepdim"),
    "MaxPool2DWithIndicesBackward0": _pool("max_pool", "max_pool2d_with_indices", *_MAX, output=0),
    "MaxPool3DWithIndicesBackward0": _pool("max_pool", "max_pool3d_with_indices", *_MAX, output=0),
    "AvgPool2DBackward0": _pool("avg_pool", "avg_pool2d", *_AVG),
    "AvgPool3DBackward0": _pool("avg_pool", "avg_pool3d", *_AVG),
    "AdaptiveAvgPool2DBackward0": _adaptive("_adaptive_avg_pool2d"),
    "AdaptiveAvgPool3DBackward0": _adaptive("_adaptive_avg_pool3d"),
}
for _dims in (1, 2, 3):
    _scales = ("scales",) if _dims == 1 else _SCALES[3 - _dims :]
    TABLE[f"UpsampleNearest{_dims}DBackward0"] = _upsample(f"upsample_nearest{_dims}d", *_scales)
    TABLE[f"UpsampleNearestExact{_dims}DBackward0"] = _upsample(f"_upsample_nearest_exact{_dims}d", *_scales)
TABLE["UpsampleLinear1DBackward0"] = _upsample("upsample_linear1d", "align_corners", "scales")
for _kind in ("Bilinear", "Bicubic"):
    TABLE[f"Upsample{_kind}2DBackward0"] = _upsample(f"upsample_{_kind.lower()}2d", "align_corners", *_SCALES[1:])
TABLE["UpsampleTrilinear3DBackward0"] = _upsample("upsample_trilinear3d", "align_corners", *_SCALES)

# The operations that make the indices that a node saves besides its output; owner_recipe uses them.
INDICES: Table = {
    "MaxPool2DWithIndicesBackward0": _pool("max_pool indices", "max_pool2d_with_indices", *_MAX, output=1),
    "MaxPool3DWithIndicesBackward0": _pool("max_pool indices", "max_pool3d_with_indices", *_MAX, output=1),
}
