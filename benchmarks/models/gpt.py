"""GPT-2 of 124 million parameters, and GPT-2 XL of 1.5 billion, on 1024 tokens.

Radford and others 2019: 12 blocks of width 768 with 12 heads, or 48 of 1600 with 25, norms before the sums.
Attention is torch's fused scaled_dot_product_attention. There is no dropout, as in today's training. The head's
matrix is the embedding's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import CrossEntropy, Workload


@dataclass(frozen=True, slots=True)
class GptShape:
    """Sizes of a GPT. The defaults are those of GPT-2 XL."""

    vocabulary: int = 50257
    tokens: int = 1024
    layers: int = 48
    width: int = 1600
    heads: int = 25


XL = GptShape()
SMALL = GptShape(layers=12, width=768, heads=12)


class Block(nn.Module):
    """Causal attention, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in made)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(x)
        return out


class Gpt(nn.Module):
    """Maps tokens to logits over the vocabulary."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.words.weight)


def gpt2(batch: int) -> Workload:
    return gpt(batch, SMALL.tokens, SMALL)


def gpt2_xl(batch: int, tokens: int = XL.tokens, layers: int = XL.layers) -> Workload:
    return gpt(batch, tokens, GptShape(layers=layers))


def gpt(batch: int, tokens: int, shape: GptShape) -> Workload:
    """A GPT of any shape, on at most its number of tokens."""
    inputs = torch.randint(shape.vocabulary, (batch, tokens))
    return Workload(Gpt(shape), (inputs,), CrossEntropy(shape.vocabulary, batch, tokens, last=True))
