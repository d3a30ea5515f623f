"""Expensive operations: convolution, matrix products, embedding and attention.

A recipe contains them only if the caller of find_recipe allows it, to recompute whole segments. Fused attention with
dropout is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from vdnn.runtime.recompute.operation import Argument, Call, Cost, Layout, Operation, Table, edge, saved
from vdnn.runtime.recompute.saved_values import is_empty

Tensor = torch.Tensor
_aten = torch.ops.aten


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


TABLE: Table = {
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
