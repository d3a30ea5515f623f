"""ViT-B/16 and ViT-L/16 on 224 x 224 images.

Dosovitskiy and others 2020: 12 layers of width 768 with 12 heads, or 24 of 1024 with 16, over 196 patches and a class
token, as in torchvision. Attention is torch's fused scaled_dot_product_attention. There is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

SIDE = 224
PATCH = 16
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class VitShape:
    """Sizes of a ViT. The defaults are those of ViT-L/16. The perceptron is four times as wide."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    side: int = SIDE


LARGE = VitShape()
BASE = VitShape(layers=12, width=768, heads=12)


class Layer(nn.Module):
    """Attention, then a perceptron, each on the norm of its input and added to the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend: Callable[..., Tensor] = functional.scaled_dot_product_attention
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width, eps=EPSILON), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in made)
        attended = self.attend(query, key, value)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(x)
        return out


class VisionTransformer(nn.Module):
    """Maps images to logits, which the head computes from the class token."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        width = shape.width
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (shape.side // PATCH) ** 2 + 1, width))
        self.layers = nn.Sequential(*(Layer(width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.head = nn.Linear(width, IMAGENET_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.places
        out: Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return out


def vit_base(batch: int) -> Workload:
    return vit(batch, BASE)


def vit_large(batch: int, layers: int = LARGE.layers) -> Workload:
    return vit(batch, replace(LARGE, layers=layers))


def vit(batch: int, shape: VitShape) -> Workload:
    """A ViT of any shape. The width must be a multiple of the heads, and the side a multiple of 16."""
    return image_workload(VisionTransformer(shape), batch, shape.side)
