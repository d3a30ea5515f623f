"""Llama 3: the whole 1B model, and a slice of the 8B model with four of its 32 layers at full width, in bfloat16.

Dubey and others 2024: groups of heads share a key and a value, a gated perceptron, rotary embeddings with base 500,000.
The head of 1B (Llama 3.2) is its embedding. The bytes that a layer saves do not depend on the number of layers, so a
slice shows the load of 8B on one device. layers=32 is the whole model. Attention is torch's fused
scaled_dot_product_attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import CrossEntropy, Workload

TOKENS = 8192
SLICE = 4
ROTARY_BASE = 500_000.0
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama. The defaults are those of 8B. `shared_heads` keys and values serve `heads` queries."""

    vocabulary: int = 128256
    layers: int = 32
    width: int = 4096
    heads: int = 32
    shared_heads: int = 8
    inner: int = 14336
    rotary_base: float = ROTARY_BASE
    has_tied_head: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


OF_8B = LlamaShape()
OF_1B = LlamaShape(layers=16, width=2048, inner=8192, has_tied_head=True)


class Attention(nn.Module):
    """Causal attention. Each key and value serves heads // shared_heads queries, and is repeated for them."""

    def __init__(self, shape: LlamaShape, dtype: torch.dtype) -> None:
        super().__init__()
        shared = shape.shared_heads * shape.head_width
        self.head_width = shape.head_width
        self.repeats = shape.heads // shape.shared_heads
        self.query = nn.Linear(shape.width, shape.width, bias=False, dtype=dtype)
        self.key = nn.Linear(shape.width, shared, bias=False, dtype=dtype)
        self.value = nn.Linear(shape.width, shared, bias=False, dtype=dtype)
        self.output = nn.Linear(shape.width, shape.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            made(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(
            query, self._repeated(key), self._repeated(value), is_causal=True
        )
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _repeated(self, x: Tensor) -> Tensor:
        """Repeat each shared head for every query head that it serves."""
        return x[:, :, None].expand(-1, -1, self.repeats, -1, -1).flatten(1, 2)


class Perceptron(nn.Module):
    """A perceptron gated by SiLU."""

    def __init__(self, shape: LlamaShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False, dtype=dtype)
        self.up = nn.Linear(shape.width, shape.inner, bias=False, dtype=dtype)
        self.down = nn.Linear(shape.inner, shape.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """Attention, then `inner` (by default the perceptron), each on the norm of its input and added to the input."""

    def __init__(self, shape: LlamaShape, dtype: torch.dtype, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=EPSILON, dtype=dtype)
        self.attention = Attention(shape, dtype)
        self.perceptron_norm = nn.RMSNorm(shape.width, eps=EPSILON, dtype=dtype)
        self.perceptron = Perceptron(shape, dtype) if inner is None else inner

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        out: Tensor = x + self.perceptron(self.perceptron_norm(x))
        return out


class Llama(nn.Module):
    """Maps tokens to logits over the vocabulary."""

    def __init__(
        self, shape: LlamaShape, tokens: int, dtype: torch.dtype, layers: list[nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width, dtype=dtype)
        self.layers = nn.ModuleList([Layer(shape, dtype) for _ in range(shape.layers)] if layers is None else layers)
        self.norm = nn.RMSNorm(shape.width, eps=EPSILON, dtype=dtype)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=dtype)
        if shape.has_tied_head:
            self.head.weight = self.words.weight
        pairs = torch.arange(0, shape.head_width, 2, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(tokens, dtype=torch.float32), shape.rotary_base ** (-pairs / shape.head_width)
        )
        self.register_buffer("cosine", torch.cat([angles, angles], 1).cos().to(dtype), persistent=False)
        self.register_buffer("sine", torch.cat([angles, angles], 1).sin().to(dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        out: Tensor = self.head(self.norm(x))
        return out


def llama_8b(batch: int, tokens: int = TOKENS, layers: int = SLICE, dtype: torch.dtype = torch.bfloat16) -> Workload:
    return llama(batch, tokens, replace(OF_8B, layers=layers), dtype)


def llama_1b(batch: int, tokens: int = TOKENS, layers: int = OF_1B.layers) -> Workload:
    return llama(batch, tokens, replace(OF_1B, layers=layers))


def llama(batch: int, tokens: int, shape: LlamaShape, dtype: torch.dtype = torch.bfloat16) -> Workload:
    """A Llama of any shape."""
    return token_workload(Llama(shape, tokens, dtype), shape.vocabulary, batch, tokens)


def token_workload(model: nn.Module, vocabulary: int, batch: int, tokens: int) -> Workload:
    """`model` on random tokens, each of which has a target."""
    inputs = torch.randint(vocabulary, (batch, tokens))
    return Workload(model, (inputs,), CrossEntropy(vocabulary, batch, tokens, last=True))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate by the position of each token. The two halves of a head are the two coordinates of its planes."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine
