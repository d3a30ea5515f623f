"""A slice of Llama 3 8B: its embedding, four of its 32 layers at full width, and its head, on 8192 tokens in bfloat16.

Dubey and others 2024: width 4096, 32 heads that share 8 keys and values, a gated perceptron of 14336, rotary places
with base 500,000. What a layer saves does not depend on how many there are, so a slice shows what 8B does to one
device. layers=32 is the whole model. Attention is torch's fused scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import CrossEntropy, Workload

VOCABULARY = 128256
TOKENS = 8192
LAYERS = 32
SLICE = 4
WIDTH = 4096
HEADS = 32
SHARED_HEADS = 8
HEAD_WIDTH = WIDTH // HEADS
INNER = 14336
ROTARY_BASE = 500_000.0
EPSILON = 1e-5


class Attention(nn.Module):
    """Causal; each key and value serves HEADS // SHARED_HEADS queries, and is repeated for them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.key = nn.Linear(WIDTH, SHARED_HEADS * HEAD_WIDTH, bias=False, dtype=dtype)
        self.value = nn.Linear(WIDTH, SHARED_HEADS * HEAD_WIDTH, bias=False, dtype=dtype)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            made(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, _repeated(key), _repeated(value), is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Perceptron(nn.Module):
    """Gated by SiLU."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False, dtype=dtype)
        self.up = nn.Linear(WIDTH, INNER, bias=False, dtype=dtype)
        self.down = nn.Linear(INNER, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """Attention, then the perceptron, each on a normed input and added to what came in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=EPSILON, dtype=dtype)
        self.attention = Attention(dtype)
        self.perceptron_norm = nn.RMSNorm(WIDTH, eps=EPSILON, dtype=dtype)
        self.perceptron = Perceptron(dtype)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        out: Tensor = x + self.perceptron(self.perceptron_norm(x))
        return out


class Llama(nn.Module):
    """Tokens to logits over the vocabulary."""

    def __init__(self, tokens: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        pairs = torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float32)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), ROTARY_BASE ** (-pairs / HEAD_WIDTH))
        self.register_buffer("cosine", torch.cat([angles, angles], 1).cos().to(dtype), persistent=False)
        self.register_buffer("sine", torch.cat([angles, angles], 1).sin().to(dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        out: Tensor = self.head(self.norm(x))
        return out


def llama_8b(batch: int, tokens: int = TOKENS, layers: int = SLICE, dtype: torch.dtype = torch.bfloat16) -> Workload:
    inputs = torch.randint(VOCABULARY, (batch, tokens))
    loss = CrossEntropy(VOCABULARY, batch, tokens, last=True)
    return Workload(Llama(tokens, layers, dtype), (inputs,), loss)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """By each token's place: the two halves of a head are the two coordinates of its planes."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def _repeated(x: Tensor) -> Tensor:
    """Each shared head once for every query head that it serves."""
    return x[:, :, None].expand(-1, -1, HEADS // SHARED_HEADS, -1, -1).flatten(1, 2)
