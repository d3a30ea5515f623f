"""BERT-large with its masked language head, on 512 tokens.

Devlin and others 2018: 24 layers of width 1024 with 16 heads, norms behind the sums, dropout 0.1. The attention is
written out (scores, softmax, dropout, product) as in the original, so its maps of tokens by tokens are there. The
head's matrix is the embedding's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import CrossEntropy, Workload

VOCABULARY = 30522
TOKENS = 512
SEGMENTS = 2
LAYERS = 24
WIDTH = 1024
HEADS = 16
INNER = 4096
DROPOUT = 0.1
EPSILON = 1e-12


class Attention(nn.Module):
    """Of all tokens to all, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (_by_head(made(x)) for made in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        mixed = self.dropout(scores.softmax(-1)) @ value
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention, then a perceptron, each with dropout and a norm behind its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        self.norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        out: Tensor = self.norm(x + self.dropout(self.perceptron(x)))
        return out


class Bert(nn.Module):
    """Tokens to logits over the vocabulary. All tokens are of the first segment."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.segments = nn.Embedding(SEGMENTS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH, eps=EPSILON))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.segments.weight[0]
        x = self.layers(self.dropout(self.norm(x)))
        return functional.linear(self.head(x), self.words.weight, self.bias)


def bert_large(batch: int, tokens: int = TOKENS, layers: int = LAYERS) -> Workload:
    inputs = torch.randint(VOCABULARY, (batch, tokens))
    return Workload(Bert(layers), (inputs,), CrossEntropy(VOCABULARY, batch, tokens, last=True))


def _by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
