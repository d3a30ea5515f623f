"""Operations of the grammar that mix values: products, convolutions, softmax, sums, pools, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.grammar import operation, simple
from tests.fuzz.shapes import fitted

if TYPE_CHECKING:
    from tests.fuzz.world import World

Tensor = torch.Tensor
Apply = Callable[[Tensor], Tensor]


@operation("linear", weight=4, draw=lambda random: (random.choice(["module", "function", "no bias", "frozen bias"]),))
def _linear(world: World, how: str) -> Apply:
    if how == "module":
        module = world.module(nn.Linear(8, 8))
        return lambda x: module(fitted(x))
    weight = world.parameter(8, 8)
    if how == "no bias":
        return lambda x: nn.functional.linear(fitted(x), weight)
    bias = world.parameter(8)
    bias.requires_grad_(how == "function")
    return lambda x: nn.functional.linear(fitted(x), weight, bias)


@operation("linear_pointwise", weight=3, draw=lambda random: (random.choice(["relu", "tanh", "gelu", "silu"]),))
def _linear_pointwise(world: World, name: str) -> Apply:
    """The most frequent chain: a function reads the output of a module."""
    module = world.module(nn.Linear(8, 8))
    apply = {"relu": torch.relu, "tanh": torch.tanh, "gelu": nn.functional.gelu, "silu": nn.functional.silu}[name]
    return lambda x: apply(module(fitted(x)))


@operation("matmul", arity=2, weight=2)
def _matmul(world: World) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: fitted(x) @ (fitted(y).t() @ fitted(y) * 0.1)


@operation("conv", weight=2, draw=lambda random: (random.choice([1, 3]), random.random() < 0.5))
def _conv(world: World, size: int, has_bias: bool) -> Apply:
    module = world.module(nn.Conv2d(2, 2, size, padding=size // 2, bias=has_bias))
    return lambda x: module(fitted(x).view(2, 2, 2, 4)).view(4, 8)


@operation("softmax", weight=2, draw=lambda random: (random.choice(["softmax", "log_softmax"]), random.choice([0, 1])))
def _softmax(world: World, name: str, dim: int) -> Apply:
    if name == "softmax":
        return lambda x: fitted(x).softmax(dim)
    return lambda x: fitted(x).log_softmax(dim)


@operation("reduce", weight=1.5, draw=lambda random: (random.choice(["sum", "mean", "amax", "logsumexp", "var"]),))
def _reduce(world: World, name: str) -> Apply:
    """Reduces the value, and broadcasts the result to its shape."""

    def applied(x: Tensor) -> Tensor:
        x = fitted(x)
        less: Any = {
            "sum": lambda: x.sum(1, keepdim=True),
            "mean": lambda: x.mean(1, keepdim=True),
            "amax": lambda: x.amax(1, keepdim=True),
            "logsumexp": lambda: x.logsumexp(1, keepdim=True),
            "var": lambda: x.var(1, keepdim=True),
        }[name]()
        return x * less * 0.3

    return applied


@operation("max_pool", weight=1.5, draw=lambda random: (random.random() < 0.4,))
def _max_pool(world: World, returns_indices: bool) -> Apply:
    def pooled(x: Tensor) -> Tensor:
        x = fitted(x).reshape(1, 2, 4, 4)
        if returns_indices:
            less, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
            return nn.functional.max_unpool2d(less, indices, (2, 2)).view(4, 8) + x.view(4, 8)
        return nn.functional.max_pool2d(x, 2)

    return pooled


@operation("attention", weight=0.7)
def _attention(world: World) -> Apply:
    project = world.parameter(8, 8)

    def attended(x: Tensor) -> Tensor:
        x = fitted(x)
        query = (x @ project).view(1, 1, 4, 8)
        return nn.functional.scaled_dot_product_attention(query, x.view(1, 1, 4, 8), x.reshape(1, 1, 4, 8)).view(4, 8)

    return attended


@operation("embedding", weight=0.7)
def _embedding(world: World) -> Apply:
    table = world.parameter(5, 8)
    return lambda x: fitted(x) * nn.functional.embedding(fitted(x)[:, 0].detach().abs().mul(3).long() % 5, table)


@operation("gather", weight=0.5, draw=lambda random: (random.choice(["gather", "index_select", "sort", "topk"]),))
def _gather(world: World, how: str) -> Apply:
    def gathered(x: Tensor) -> Tensor:
        x = fitted(x)
        if how == "sort":
            return x.sort(1).values
        if how == "topk":
            return x.topk(4, 1).values
        order = x.detach().argsort(1)
        return x.gather(1, order) if how == "gather" else x.index_select(1, order[0])

    return gathered


@operation("recurrent", weight=0.4)
def _recurrent(world: World) -> Apply:
    module = world.module(nn.GRUCell(8, 8))
    return lambda x: module(fitted(x), fitted(x).tanh())


simple("prod", lambda x: fitted(x) * fitted(x).mean(0).prod(), weight=0.2)
simple("cumsum", lambda x: fitted(x).cumsum(1) * 0.2, weight=0.3)
