"""BERT-large and BERT-base with their masked language head, on up to 512 tokens.

Devlin and others 2018: 24 layers of width 1024 with 16 heads, or 12 of width 768 with 12; norms after the sums, dropout
0.1. Attention is written out (scores, softmax, dropout, product) as in the original, so that autograd saves its maps of
tokens by tokens. The head's matrix is the embedding's.
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
BASE_LAYERS = 12
BASE_WIDTH = 768
HEAD_WIDTH = 64
DROPOUT = 0.1
EPSILON = 1e-12


class Attention(nn.Module):
    """Attention of all tokens to all tokens, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (_by_head(made(x)) for made in (self.query, self.key, self.value))
        scores = self.masked(query @ key.transpose(-1, -2) / math.sqrt(HEAD_WIDTH))
        mixed = self.dropout(scores.softmax(-1)) @ value
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def masked(self, scores: Tensor) -> Tensor:
        """The scores as the softmax gets them: here no token is padding."""
        return scores


class Layer(nn.Module):
    """Attention, then a perceptron, each with dropout and a norm after its sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        out: Tensor = self.norm(x + self.dropout(self.perceptron(x)))
        return out


class Bert(nn.Module):
    """Maps tokens to logits over the vocabulary. All tokens are in the first segment."""

    def __init__(self, layers: int, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(TOKENS, width)
        self.segments = nn.Embedding(SEGMENTS, width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=EPSILON))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.segments.weight[0]
        x = self.layers(self.dropout(self.norm(x)))
        return functional.linear(self.head(x), self.words.weight, self.bias)


def bert_large(batch: int, tokens: int = TOKENS, layers: int = LAYERS) -> Workload:
    return bert(batch, tokens, layers, WIDTH)


def bert_base(batch: int, tokens: int = TOKENS) -> Workload:
    return bert(batch, tokens, BASE_LAYERS, BASE_WIDTH)


def bert(batch: int, tokens: int, layers: int, width: int, vocabulary: int = VOCABULARY) -> Workload:
    """BERT of any width that is a multiple of 64."""
    inputs = torch.randint(vocabulary, (batch, tokens))
    model = Bert(layers, width, vocabulary)
    return Workload(model, (inputs,), CrossEntropy(vocabulary, batch, tokens, last=True))


def _by_head(x: Tensor) -> Tensor:
    heads: Tensor = x.unflatten(-1, (-1, HEAD_WIDTH))  # type: ignore[no-untyped-call]
    return heads.transpose(1, 2)
