"""The networks of the cases: a transformer with attention written out, and a mixture of experts with real routing.

Attention is eager: autograd saves its maps of tokens by tokens, so that memory grows with the square of the length. On
fake tensors a router has no data, so the caller says how many tokens each expert takes; it may take none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CHOSEN = 2  # experts of each token


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a transformer. `experts` 0: each layer has one perceptron."""

    vocabulary: int = 16_000
    width: int = 768
    heads: int = 12
    layers: int = 3
    experts: int = 0


class Attention(nn.Module):
    """Attention of all tokens to all tokens that `hidden` does not hide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        parts = self.query_key_value(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = scores.masked_fill(hidden, -1e9).softmax(-1) @ value
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Perceptron(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Experts(nn.Module):
    """Perceptrons, of which a router chooses two for each token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Perceptron(width) for _ in range(experts))

    def forward(self, x: Tensor, tokens_of_expert: Sequence[int]) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, -1)
        order = chosen.flatten().argsort()  # rows by their expert
        parts = torch.split(tokens.index_select(0, order // CHOSEN), list(tokens_of_expert))
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        back = made.index_select(0, order.argsort()).unflatten(0, (-1, CHOSEN))  # type: ignore[no-untyped-call]
        out: Tensor = (back * weights[..., None]).sum(1).view_as(x)
        return out


class Layer(nn.Module):
    """Attention, then a perceptron or experts, each behind a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads)
        self.perceptron = Experts(shape.width, shape.experts) if shape.experts else Perceptron(shape.width)

    def forward(self, x: Tensor, hidden: Tensor, *tokens_of_expert: Sequence[int]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), hidden)
        out: Tensor = x + self.perceptron(self.norm(x), *tokens_of_expert)
        return out


class Transformer(nn.Module):
    """Maps tokens to the output of the last layer. `routes`: the tokens of each expert, for each layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, hidden: Tensor, routes: Sequence[Sequence[int]] = ()) -> Tensor:
        x = self.words(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, hidden, *routes[index : index + 1])
        out: Tensor = self.norm(x)
        return out


class Decoder(Transformer):
    """A language model: tokens see those before them. Returns its loss."""

    def loss(self, batch: int, length: int, routes: Sequence[Sequence[int]] = ()) -> Tensor:
        tokens = torch.randint(self.words.num_embeddings, (batch, length))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits = functional.linear(self(tokens, hidden, routes), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Encoder(Transformer):
    """A classifier of texts that are padded to the longest of their batch. Returns its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.classes = nn.Linear(shape.width, 10)

    def loss(self, batch: int, length: int) -> Tensor:
        lengths = torch.randint(1, length + 1, (batch,))
        hidden = torch.arange(length) >= lengths[:, None]
        tokens = torch.randint(self.words.num_embeddings, (batch, length))
        texts = self(tokens, hidden[:, None, None, :])
        logits = self.classes(texts.masked_fill(hidden[..., None], 0).mean(1))
        return functional.cross_entropy(logits, torch.randint(self.classes.out_features, (batch,)))
