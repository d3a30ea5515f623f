"""The audited table: the operations that can be run again, by the name of autograd's node.

Operations that are not in the table end a chain: custom Functions, checkpoints, in-place writes to views, random
operations that keep no mask, and everything that was not audited. Each entry has a test of bitwise equality.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from vdnn.runtime.recompute.node_notes import EPS, has_no_bias
from vdnn.runtime.recompute.operation import (
    ALPHA,
    FIRST,
    Argument,
    Call,
    Choice,
    Cost,
    Layout,
    Node,
    Operation,
    Table,
    edge,
    pieces,
    saved,
    unary,
    view,
)
from vdnn.runtime.recompute.saved_values import is_empty

Tensor = torch.Tensor
_aten = torch.ops.aten


# Expensive operations: convolution, matrix products, embedding and attention.
#
# A recipe contains them only if the caller of find_recipe allows it, to recompute whole segments. Fused attention with
# dropout is refused.


def _had_no_bias(node: Any) -> bool:
    return not any(node._saved_bias_sym_sizes_opt or ())


def _convolution(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.convolution(input, weight, bias, *call.scalars)


def _attention(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    dropout, is_causal, scale = call.scalars
    made: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, attn_mask=mask, scale=scale
    )[0]
    return made


def _flash(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    dropout, is_causal, scale = call.scalars
    made: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[
        0
    ]
    return made


def _efficient(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    dropout, is_causal, scale = call.scalars
    made: Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout, is_causal, scale=scale
    )[0]
    return made


def _cudnn(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    dropout, is_causal, scale = call.scalars
    made: Tensor = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, True, dropout, is_causal, False, scale=scale
    )[0]
    return made


def _without_dropout(operation: Operation) -> Any:
    """A fused kernel draws its dropout mask inside. Its public function cannot draw that mask again: it takes the seed
    from the generator."""

    def chosen(node: Any) -> Operation | None:
        return None if node._saved_dropout_p else operation

    return chosen


def _fused(name: str, run: Any, mask: str | None) -> Any:
    arguments = [saved("query", 0), saved("key", 1), saved("value", 2)]
    if mask is not None:
        arguments.append(Argument(mask, None, lambda node: is_empty(node, mask, "query")))
    scalars = ("dropout_p", "is_causal", "scale")
    return _without_dropout(Operation(name, run, tuple(arguments), scalars, cost=Cost.EXPENSIVE))


def _product(name: str, run: Any, *arguments: Argument, scalars: tuple[str, ...] = ()) -> Operation:
    return Operation(name, run, arguments, scalars, cost=Cost.EXPENSIVE)


EXPENSIVE: Table = {
    "ConvolutionBackward0": Operation(
        "convolution",
        _convolution,
        (saved("input", 0), saved("weight", 1), Argument(None, 2, _had_no_bias)),
        ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        cost=Cost.EXPENSIVE,
        on_cudnn=True,
    ),
    "MmBackward0": _product("mm", lambda call, a, b: torch.mm(a, b), saved("self", 0), saved("mat2", 1)),
    "BmmBackward0": _product("bmm", lambda call, a, b: torch.bmm(a, b), saved("self", 0), saved("mat2", 1)),
    "AddmmBackward0": _product(
        "addmm",
        lambda call, c, a, b: torch.addmm(c, a, b, beta=call.scalars[0], alpha=call.scalars[1]),
        edge(0),
        saved("mat1", 1),
        saved("mat2", 2),
        scalars=("beta", "alpha"),
    ),
    "BaddbmmBackward0": _product(
        "baddbmm",
        lambda call, c, a, b: torch.baddbmm(c, a, b, beta=call.scalars[0], alpha=call.scalars[1]),
        edge(0),
        saved("batch1", 1),
        saved("batch2", 2),
        scalars=("beta", "alpha"),
    ),
    "EmbeddingBackward0": Operation(
        "embedding",
        lambda call, weight, indices: torch.embedding(weight, indices),
        (edge(0), Argument("indices")),
        cost=Cost.EXPENSIVE,
        layout=Layout.IGNORED,
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": _fused("attention", _attention, "attn_mask"),
    "ScaledDotProductFlashAttentionBackward0": _fused("flash attention", _flash, None),
    "ScaledDotProductEfficientAttentionBackward0": _fused("efficient attention", _efficient, "attn_bias"),
    "ScaledDotProductCudnnAttentionBackward0": _fused("cudnn attention", _cudnn, "attn_bias"),
}


# Batch, layer, group and instance norm, and the fused RMS norm.
#
# A norm in training computes its statistics from its input. The recompute gets no running statistics, so it does not
# update them. A norm in evaluation reads the running statistics, which its node saved.


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


NORMS: Table = {
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


# Softmax, sums and means, pooling, upsampling.


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

REDUCTIONS: Table = {
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
    REDUCTIONS[f"UpsampleNearest{_dims}DBackward0"] = _upsample(f"upsample_nearest{_dims}d", *_scales)
    REDUCTIONS[f"UpsampleNearestExact{_dims}DBackward0"] = _upsample(f"_upsample_nearest_exact{_dims}d", *_scales)
REDUCTIONS["UpsampleLinear1DBackward0"] = _upsample("upsample_linear1d", "align_corners", "scales")
for _kind in ("Bilinear", "Bicubic"):
    REDUCTIONS[f"Upsample{_kind}2DBackward0"] = _upsample(f"upsample_{_kind.lower()}2d", "align_corners", *_SCALES[1:])
REDUCTIONS["UpsampleTrilinear3DBackward0"] = _upsample("upsample_trilinear3d", "align_corners", *_SCALES)

# The operations that make the indices that a node saves besides its output; owner_recipe uses them.
INDICES: Table = {
    "MaxPool2DWithIndicesBackward0": _pool("max_pool indices", "max_pool2d_with_indices", *_MAX, output=1),
    "MaxPool3DWithIndicesBackward0": _pool("max_pool indices", "max_pool3d_with_indices", *_MAX, output=1),
}


# Views, and operations that copy values without computing: cat, stack, repeat, roll.
#
# If a node does not keep the shape of its result (view, expand), the recipe uses the shape of the node's output, which
# autograd knows.


def _viewed(call: Call, input: Tensor) -> Tensor:
    """A view, or a reshape if the input's strides allow no view: those of the original may have been different."""
    return input.reshape(call.shape)


def _split(call: Call, input: Tensor) -> Tensor:
    size, dim = call.scalars
    pieces: tuple[Tensor, ...] = (
        torch.split_with_sizes(input, size, dim) if isinstance(size, tuple) else _aten.split(input, size, dim)
    )
    return pieces[call.output_nr]


def _joined(name: str, join: Any) -> Operation:
    def joined(call: Call, *parts: Tensor) -> Tensor:
        made: Tensor = join(parts, call.scalars[0])
        return made

    return Operation(name, joined, (), ("dim",), takes_every_edge=True, layout=Layout.COPIED, is_by_row=True)


def _copied(name: str, run: Callable[..., Tensor], *scalars: str) -> Operation:
    return Operation(name, run, FIRST, scalars, layout=Layout.COPIED, is_by_row=True)


VIEWS: Table = {
    "ViewBackward0": view("view", _viewed),
    "UnsafeViewBackward0": view("view", _viewed),
    "ReshapeAliasBackward0": view("view", _viewed),
    "AliasBackward0": view("alias", lambda call, x: x),
    "TBackward0": view("t", lambda call, x: x.t()),
    "TransposeBackward0": view("transpose", lambda call, x: x.transpose(*call.scalars), "dim0", "dim1"),
    "PermuteBackward0": view("permute", lambda call, x: x.permute(call.scalars[0]), "dims"),
    "ExpandBackward0": view("expand", lambda call, x: x.expand(call.shape)),
    "UnsqueezeBackward0": view("unsqueeze", lambda call, x: x.unsqueeze(call.scalars[0]), "dim"),
    "SqueezeBackward0": view("squeeze", lambda call, x: x.squeeze()),
    "SqueezeBackward1": view("squeeze", lambda call, x: x.squeeze(call.scalars[0]), "dim"),
    "SqueezeBackward2": view("squeeze", lambda call, x: x.squeeze(call.scalars[0]), "dim"),
    "SelectBackward0": view("select", lambda call, x: x.select(*call.scalars), "dim", "index"),
    "SliceBackward0": view(
        "slice", lambda call, x: _aten.slice(x, *call.scalars), "dim", "start", "end", "step", sizes=("start", "end")
    ),
    "SplitBackward0": pieces("split", _split, "split_size", "dim", sizes=("split_size",)),
    "UnsafeSplitBackward0": pieces("split", _split, "split_size", "dim", sizes=("split_size",)),
    "SplitWithSizesBackward0": pieces("split", _split, "split_sizes", "dim", sizes=("split_sizes",)),
    "UnbindBackward0": pieces("unbind", lambda call, x: x.unbind(call.scalars[0])[call.output_nr], "dim"),
    "CatBackward0": _joined("cat", torch.cat),
    "StackBackward0": _joined("stack", torch.stack),
    "RepeatBackward0": _copied("repeat", lambda call, x: x.repeat(call.scalars[0]), "repeats"),
    "RollBackward0": _copied("roll", lambda call, x: x.roll(*call.scalars), "shifts", "dims"),
}


# Activations, arithmetic, casts and dropout: one output value for one value of each operand.
#
# Some operations are not in the table because their node does not keep what they need: threshold (its value),
# masked_fill and constant padding (the value filled in), clamp by tensors. The addition of a number also ends a chain:
# its edge leads to no node.


_TWO = (saved("self", 0), saved("other", 1))


def _alpha(run: str) -> Operation:
    function = getattr(torch, run)
    return Operation(run, lambda call, a, b: function(a, b, alpha=call.scalars[0]), (edge(0), edge(1)), ALPHA)


def _masked(call: Call, input: Tensor, mask: Tensor) -> Tensor:
    """Dropout with the saved mask, rounded as the kernels round. The CPU's kernel rounds the scale to the input's
    dtype; only this overload of mul_ does the same. CUDA's divides by the probability in its own precision."""
    kept = 1.0 - call.scalars[0]
    masked = input.mul(mask)
    if input.device.type == "cpu":
        made: Tensor = torch.ops.aten.mul_.Scalar(masked, 0.0 if kept == 0 else 1.0 / kept)
        return made
    if input.dtype is not torch.float64:
        (kept,) = struct.unpack("f", struct.pack("f", kept))
    return masked.mul_(0.0 if kept == 0 else 1.0 / kept)


def _cast(call: Call, input: Tensor) -> Tensor:
    return input.to(device=call.device, dtype=call.dtype, copy=True)


def _clone(call: Call, input: Tensor) -> Tensor:
    """The node does not save the memory format. A tensor that is not dense was cloned to make it contiguous."""
    return input.clone() if _is_dense(input) else input.clone(memory_format=torch.contiguous_format)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


_PLAIN = ("neg", "reciprocal", "rsqrt", "sqrt", "exp", "expm1", "log", "log2", "log10", "sin", "cos", "abs")
_MORE = ("tanh", "sigmoid", "erf", "erfc", "sgn", "atan", "asin", "acos", "sinh", "cosh", "tan", "exp2")


def _function(name: str) -> Operation:
    run = getattr(torch, name)
    return unary(name, lambda call, x: run(x))


ELEMENTWISE: Table = {f"{name.capitalize()}Backward0": _function(name) for name in (*_PLAIN, *_MORE)}
ELEMENTWISE |= {
    "Log1PBackward0": _function("log1p"),
    "ReluBackward0": unary("relu", lambda call, x: torch.relu(x), slot=None),
    "LeakyReluBackward0": unary(
        "leaky_relu", lambda call, x: functional.leaky_relu(x, call.scalars[0]), "negative_slope"
    ),
    "HardtanhBackward0": unary(
        "hardtanh", lambda call, x: torch.ops.aten.hardtanh(x, *call.scalars), "min_val", "max_val"
    ),
    "ClampBackward1": unary("clamp", lambda call, x: torch.clamp(x, *call.scalars), "min", "max"),
    "ClampMinBackward0": unary("clamp_min", lambda call, x: torch.clamp_min(x, call.scalars[0]), "min"),
    "EluBackward0": unary("elu", lambda call, x: torch.ops.aten.elu(x, *call.scalars), "alpha", "scale", "input_scale"),
    "GeluBackward0": unary("gelu", lambda call, x: functional.gelu(x, approximate=call.scalars[0]), "approximate"),
    "SiluBackward0": unary("silu", lambda call, x: functional.silu(x)),
    "MishBackward0": unary("mish", lambda call, x: functional.mish(x)),
    "HardswishBackward0": unary("hardswish", lambda call, x: functional.hardswish(x)),
    "HardsigmoidBackward0": unary("hardsigmoid", lambda call, x: functional.hardsigmoid(x)),
    "SoftplusBackward0": unary("softplus", lambda call, x: functional.softplus(x, *call.scalars), "beta", "threshold"),
    "LogSigmoidBackward0": unary("log_sigmoid", lambda call, x: functional.logsigmoid(x)),
    "GluBackward0": unary("glu", lambda call, x: functional.glu(x, call.scalars[0]), "dim"),
    "PreluKernelBackward0": Operation(
        "prelu", lambda call, x, w: torch.ops.aten._prelu_kernel(x, w), (saved("self", 0), saved("weight", 1))
    ),
    "AddBackward0": _alpha("add"),
    "SubBackward0": _alpha("sub"),
    "RsubBackward0": _alpha("rsub"),
    "MulBackward0": Operation("mul", lambda call, a, b: torch.mul(a, b), _TWO),
    "DivBackward0": Operation("div", lambda call, a, b: torch.div(a, b), _TWO),
    "DivBackward1": unary("div", lambda call, x: torch.ops.aten.div.Scalar(x, call.scalars[0]), "other", slot=None),
    "PowBackward0": unary("pow", lambda call, x: torch.pow(x, call.scalars[0]), "exponent"),
    "PowBackward1": Operation("pow", lambda call, a, b: torch.pow(a, b), (saved("self", 0), saved("exponent", 1))),
    "PowBackward2": Operation("pow", lambda call, b: torch.pow(call.scalars[0], b), (saved("exponent", 0),), ("self",)),
    "AddcmulBackward0": Operation(
        "addcmul",
        lambda call, x, a, b: torch.addcmul(x, a, b, value=call.scalars[0]),
        (edge(0), saved("tensor1", 1), saved("tensor2", 2)),
        ("value",),
    ),
    "LerpBackward0": Operation(
        "lerp", lambda call, a, b: torch.lerp(a, b, call.scalars[0]), (edge(0), edge(1)), ("weight",)
    ),
    "WhereBackward0": Operation(
        "where", lambda call, c, a, b: torch.where(c, a, b), (Argument("condition"), edge(0), edge(1))
    ),
    "NativeDropoutBackward0": Operation("dropout", _masked, (edge(0), Argument("result1")), ("p",)),
    "ToCopyBackward0": Operation("cast", _cast, FIRST),
    "CloneBackward0": Operation("clone", _clone, FIRST),
}
_scaled = replace(
    unary("mul", lambda call, x: torch.ops.aten.mul.Scalar(x, call.scalars[0]), "other", slot=None),
    may_be_in_place=True,
    layout=Layout.EXACT,
    is_by_row=True,
)
_NEVER_IN_PLACE = ("gelu", "softplus", "log_sigmoid", "glu", "prelu", "rsub", "where", "dropout", "cast", "clone")
# Vectorized code and the scalar code for the remainder give equal bits, because each operation rounds once.
_EXACT = ("neg", "abs", "sgn", "sqrt", "reciprocal", "relu", "add", "sub", "rsub", "mul", "div")
_ROUND_ONCE = ("hardtanh", "clamp", "clamp_min", "where", "leaky_relu", "dropout")
_LAYOUTS = dict.fromkeys(_EXACT, Layout.EXACT) | dict.fromkeys(_ROUND_ONCE, Layout.IGNORED)
_LAYOUTS |= {"cast": Layout.ASKED, "clone": Layout.ASKED}
ELEMENTWISE = {
    node: replace(
        entry,
        may_be_in_place=entry.name not in _NEVER_IN_PLACE,
        layout=_LAYOUTS.get(entry.name, Layout.READ),
        is_by_row=True,
    )
    for node, entry in ELEMENTWISE.items()
    if isinstance(entry, Operation)
}


def _scaled_by_a_number(node: Any) -> Operation | None:
    """None in half precision: there the CPU's in-place variant rounds the number first, and the node
    does not tell the variants apart."""
    return _scaled if node._input_metadata[0].dtype.itemsize >= 4 else None


ELEMENTWISE["MulBackward1"] = _scaled_by_a_number


_TABLE = {**ELEMENTWISE, **VIEWS, **REDUCTIONS, **NORMS, **EXPENSIVE}


def operation_of(node: Node) -> Operation | None:
    """The operation that made the node's outputs, if it is in the table."""
    found = _TABLE.get(node.name())
    if found is None or isinstance(found, Operation):
        return found
    return found(node)


def is_chosen_by_its_node(node: Node) -> bool:
    """True if the operation depends on more than the name of the node."""
    found = _TABLE.get(node.name())
    return found is not None and not isinstance(found, Operation)


def indices_of(node: Node) -> Operation | None:
    """The operation that made the integers that the node saved along with its output."""
    found = INDICES.get(node.name())
    return found if isinstance(found, Operation) else None


def recipe_names() -> tuple[str, ...]:
    """The names of the table's nodes, in its order."""
    return tuple(_TABLE)
