"""Batch, layer, group and instance norm, and the fused RMS norm.

A norm in training computes its statistics from its input. The recompute gets no running statistics, so it does not
update them. A norm in evaluation reads the running statistics, which its node saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vdnn.runtime.recompute.node_notes import EPS, has_no_bias
from vdnn.runtime.recompute.operation import Argument, Call, Choice, Layout, Node, Operation, Table
from vdnn.runtime.recompute.saved_values import is_empty

Tensor = torch.Tensor
_aten = torch.ops.aten


def _has_no_weight(node: Node) -> bool:
    return is_empty(node, "weight")


def _has_no_saved_bias(node: Node) -> bool:
    return is_empty(node, "bias")


_INPUT = Argument("input", 0)
_WEIGHT = Argument("weight", 1, _has_no_weight)
# The node does not save its bias, so an edge that leads to no node does not tell whether there was one. The call does.
_BIAS = Argument(None, 2, has_no_bias)
_STATISTICS = (Argument("running_mean"), Argument("running_var"))


def _batch_norms(run: Callable[..., Any], eps: str) -> Choice:
    """`run(input, weight, bias, mean, variance, training, momentum, eps)`."""

    def normed(call: Call, input: Tensor, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor) -> Tensor:
        mean, variance = statistics or (None, None)
        made: Tensor = run(input, weight, bias, mean, variance, not statistics, 0.0, *call.scalars)[0]
        return made

    training = Operation("batch_norm", normed, (_INPUT, _WEIGHT, _BIAS), (eps,))
    evaluation = Operation("batch_norm in eval", normed, (_INPUT, _WEIGHT, _BIAS, *_STATISTICS), (eps,))

    def chosen(node: Any) -> Operation:
        return training if node._saved_training else evaluation

    return chosen


def _layer(call: Call, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.native_layer_norm(input, call.scalars[0], weight, bias, call.scalars[1])[0]
    return made


def _rms(call: Call, input: Tensor, weight: Tensor | None) -> Tensor:
    made: Tensor = _aten._fused_rms_norm(input, call.scalars[0], weight, call.scalars[1])[0]
    return made


def _group(call: Call, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.native_group_norm(input, weight, bias, *call.scalars)[call.output_nr]
    return made


_GROUP_SCALARS = ("N", "C", "HxW", "group")
_GROUP_NORM = Operation(
    "group_norm", _group, (_INPUT, _WEIGHT, _BIAS), (*_GROUP_SCALARS, "eps"), makes_every_output=True
)
_GROUP_NORM_WITHOUT_EPS = replace(_GROUP_NORM, scalars=_GROUP_SCALARS, facts=(EPS,))  # newer versions of torch


def _group_norm(node: Any) -> Operation:
    return _GROUP_NORM if hasattr(node, "_saved_eps") else _GROUP_NORM_WITHOUT_EPS


TABLE: Table = {
    "NativeBatchNormBackward0": _batch_norms(torch.native_batch_norm, "eps"),
    "CudnnBatchNormBackward0": _batch_norms(_aten.cudnn_batch_norm, "epsilon"),
    "MiopenBatchNormBackward0": _batch_norms(_aten.miopen_batch_norm, "epsilon"),
    "NativeLayerNormBackward0": Operation(
        "layer_norm",
        _layer,
        (_INPUT, _WEIGHT, Argument("bias", 2, _has_no_saved_bias)),
        ("normalized_shape",),
        (EPS,),
        layout=Layout.CONTIGUOUS,
        is_by_row=True,
    ),
    "FusedRmsNormBackward0": Operation(
        "rms_norm", _rms, (_INPUT, _WEIGHT), ("normalized_shape",), (EPS,), layout=Layout.CONTIGUOUS, is_by_row=True
    ),
    "WeightNormInterfaceBackward0": Operation(
        "weight_norm",
        lambda call, v, g: _aten._weight_norm_interface(v, g, call.scalars[0])[0],
        (Argument("v", 0), Argument("g", 1)),
        ("dim",),
    ),
    "NativeGroupNormBackward0": _group_norm,
}
