"""The models that test_on_cuda.py trains, each with an input. Their size depends on the place."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.runtime.rigs.training_places import Place


def cnn(place: Place) -> tuple[nn.Module, torch.Tensor]:
    """A CNN without max pooling, whose backward on a GPU adds up in any order."""
    width = 8 * place.size
    model = nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )
    return model.to(place.device), torch.randn(2 * place.size, 3, 32, 32, device=place.device)


def cnn_channels_last(place: Place) -> tuple[nn.Module, torch.Tensor]:
    model, x = cnn(place)
    return model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]


def perceptron(place: Place) -> tuple[nn.Module, torch.Tensor]:
    width = 64 * place.size
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers).to(place.device), torch.randn(16 * place.size, width, device=place.device)


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each with dropout and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.query_key_value(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in made)
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        x = x + functional.dropout(self.mixed(attended.transpose(1, 2).flatten(2)), 0.1)
        out: torch.Tensor = x + self.inner(self.norms[1](x))
        return out


def transformer(place: Place) -> tuple[nn.Module, torch.Tensor]:
    width = 32 * place.size
    model = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(2)))
    return model.to(place.device), torch.randn(2, 16 * place.size, width, device=place.device)


def deep_cnn(place: Place) -> tuple[nn.Module, torch.Tensor]:
    """A CNN whose feature maps take most of its memory."""
    width = 8 * place.size
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(10):
        layers += [nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers).to(place.device), torch.randn(4 * place.size, 3, 32, 32, device=place.device)


MODELS = {"cnn": cnn, "cnn_channels_last": cnn_channels_last, "perceptron": perceptron, "transformer": transformer}
