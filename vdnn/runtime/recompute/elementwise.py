"""Activations, arithmetic, casts and dropout: one output value for one value of each operand.

Some operations are not in the table because their node does not keep what they need: threshold (its value),
masked_fill and constant padding (the value filled in), clamp by tensors. The addition of a number also ends a chain:
its edge leads to no node.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from vdnn.runtime.recompute.operation import FIRST, Argument, Call, Layout, Operation, Table, edge, saved, unary

Tensor = torch.Tensor

_TWO = (saved("self", 0), saved("other", 1))


def _alpha(run: str) -> Operation:
    function = getattr(torch, run)
    return Operation(run, lambda call, a, b: function(a, b, alpha=call.scalars[0]), (edge(0), edge(1)), ("alpha",))


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


TABLE: Table = {f"{name.capitalize()}Backward0": _function(name) for name in (*_PLAIN, *_MORE)}
TABLE |= {
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
TABLE = {
    node: replace(
        entry,
        may_be_in_place=entry.name not in _NEVER_IN_PLACE,
        layout=_LAYOUTS.get(entry.name, Layout.READ),
        is_by_row=True,
    )
    for node, entry in TABLE.items()
    if isinstance(entry, Operation)
}


def _scaled_by_a_number(node: Any) -> Operation | None:
    """None in half precision: there the CPU's in-place variant rounds the number first, and the node
    does not tell the variants apart."""
    return _scaled if node._input_metadata[0].dtype.itemsize >= 4 else None


TABLE["MulBackward1"] = _scaled_by_a_number
