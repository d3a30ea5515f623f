"""Twenty small models, one for each kind of network that the accelerator must run as the CPU does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.runtime.rigs.networks import (
    UNet,
    conv_chain,
    images,
    perceptron,
    small_densenet,
    small_googlenet,
    small_resnet,
    small_vgg,
)
from tests.runtime.session.test_topologies import Last


class Attention(nn.Module):
    """Self-attention of four heads, causal, by torch's plain implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.project(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + out


class TiedLanguageModel(nn.Module):
    """Embeds tokens, and uses the embedding's weights to predict the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.trunk = perceptron(depth=2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(self.trunk(self.embedding(tokens)), self.embedding.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Upsampler(nn.Module):
    """Group norms between transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(3, 8, 4, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.ConvTranspose2d(8, 4, 3, padding=1),
            nn.InstanceNorm2d(4, affine=True),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Checkpointed(nn.Module):
    """Blocks that keep only their inputs."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(perceptron(depth=2) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return x


class MixedPrecision(nn.Module):
    """Computes in bfloat16 from float32 weights, with torch.autocast or with explicit casts."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self.inner = perceptron(depth=2)
        self.autocast = autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.autocast:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                out: torch.Tensor = self.inner(x)
            return out.float()
        for layer in self.inner:
            if isinstance(layer, nn.Linear):
                assert layer.bias is not None
                x = functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
            else:
                x = layer(x)
        return x.float()


def frozen_trunk() -> nn.Module:
    model = small_resnet()
    for part in (model[0], model[3]):
        part.requires_grad_(False)
    return model


def vectors() -> torch.Tensor:
    return torch.randn(4, 16)


def sequences() -> torch.Tensor:
    return torch.randn(2, 6, 16)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    make_input: Callable[[], torch.Tensor]


MODELS: dict[str, Case] = {
    "perceptron": Case(perceptron, vectors),
    "conv chain": Case(conv_chain, images),
    "channels last": Case(
        lambda: conv_chain().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: images().contiguous(memory_format=torch.channels_last),
    ),
    "vgg": Case(lambda: without_dropout(small_vgg()), images),
    "resnet": Case(small_resnet, images),
    "frozen resnet": Case(frozen_trunk, images),
    "densenet": Case(small_densenet, images),
    "googlenet": Case(small_googlenet, images),
    "u-net": Case(UNet, images),
    "upsampler": Case(Upsampler, images),
    "lstm": Case(lambda: Last(nn.LSTM(16, 8, num_layers=2)), lambda: torch.randn(5, 2, 16)),
    "gru": Case(lambda: Last(nn.GRU(16, 8, bidirectional=True)), lambda: torch.randn(5, 2, 16)),
    "transformer": Case(
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu"), sequences
    ),
    "attention": Case(Attention, sequences),
    "tied language model": Case(TiedLanguageModel, lambda: torch.arange(40).view(2, 20) % 20),
    "layer norm": Case(
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)), vectors
    ),
    "checkpointed": Case(lambda: Checkpointed(reentrant=False), vectors),
    "checkpointed, reentrant": Case(lambda: Checkpointed(reentrant=True), vectors),
    "bfloat16 by casts": Case(lambda: MixedPrecision(autocast=False), vectors),
    "autocast": Case(lambda: MixedPrecision(autocast=True), vectors),
}


def without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).float().square().sum()
        loss.backward()
        return loss

    return step


def on_the_accelerator(*things: Any) -> Any:
    """Copies of modules or tensors on the accelerator, with the same layouts."""
    return [copy.deepcopy(thing).to("deferred") for thing in things]
