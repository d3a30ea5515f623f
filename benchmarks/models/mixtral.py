"""A slice of Mixtral 8x7B: one of its 32 layers at full width, with eight experts and two of them for each token.

Jiang and others 2024: the layers of Llama, with perceptrons that a router chooses. Shapes do not depend on data here,
so that a step can be rehearsed without data: every expert takes the same number of tokens, a quarter more than its
share, and tokens beyond that are dropped, as in GShard (Lepikhin and others 2020). layers=32 is the whole model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.llama import Layer, Llama, LlamaShape, token_workload
from benchmarks.models.workload import Workload

TOKENS = 4096
EXPERTS = 8
CHOSEN = 2
SPARE = 1.25
OF_MIXTRAL = LlamaShape(vocabulary=32000, rotary_base=1e6)


class Experts(nn.Module):
    """The chosen perceptrons of each token, weighted by the router."""

    def __init__(self, shape: LlamaShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, EXPERTS, bias=False, dtype=dtype)
        self.gate = nn.Parameter(torch.empty(EXPERTS, shape.width, shape.inner, dtype=dtype))
        self.up = nn.Parameter(torch.empty(EXPERTS, shape.width, shape.inner, dtype=dtype))
        self.down = nn.Parameter(torch.empty(EXPERTS, shape.inner, shape.width, dtype=dtype))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).float().softmax(-1).topk(CHOSEN, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        room = max(int(SPARE * CHOSEN * len(tokens) / EXPERTS), 1)
        # Each expert takes tokens in their order. Tokens beyond its capacity go to the last row, which is dropped.
        is_mine = functional.one_hot(experts.flatten(), EXPERTS)
        place = (is_mine.cumsum(0) * is_mine).sum(-1) - 1
        row = torch.where(place < room, experts.flatten() * room + place, EXPERTS * room)
        sent = tokens.repeat_interleave(CHOSEN, 0)
        gathered = sent.new_zeros(EXPERTS * room + 1, sent.shape[-1]).index_copy(0, row, sent)
        by_expert = gathered[:-1].unflatten(0, (EXPERTS, room))  # type: ignore[no-untyped-call]
        made = torch.bmm(functional.silu(torch.bmm(by_expert, self.gate)) * torch.bmm(by_expert, self.up), self.down)
        back = torch.cat([made.flatten(0, 1), made.new_zeros(1, made.shape[-1])]).index_select(0, row)
        chosen: Tensor = back.unflatten(0, (-1, CHOSEN))  # type: ignore[no-untyped-call]
        out: Tensor = (chosen * weights[..., None]).sum(1).view_as(x)
        return out


def mixtral(batch: int, tokens: int = TOKENS, layers: int = 1) -> Workload:
    return mixture(batch, tokens, replace(OF_MIXTRAL, layers=layers), torch.bfloat16)


def mixture(batch: int, tokens: int, shape: LlamaShape, dtype: torch.dtype) -> Workload:
    """A mixture of experts of any shape."""
    layers: list[nn.Module] = [Layer(shape, dtype, Experts(shape, dtype)) for _ in range(shape.layers)]
    return token_workload(Llama(shape, tokens, dtype, layers), shape.vocabulary, batch, tokens)
