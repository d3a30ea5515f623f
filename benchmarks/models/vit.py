"""ViT-L/16 on 224 x 224 images.

Dosovitskiy and others 2020: 24 layers of width 1024 with 16 heads over 196 patches and a class token, as torchvision
has it. Attention is torch's fused scaled_dot_product_attention; no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.workload import IMAGENET_CLASSES, Workload, image_workload

SIDE = 224
PATCH = 16
LAYERS = 24
WIDTH = 1024
HEADS = 16
INNER = 4096
EPSILON = 1e-6


class Layer(nn.Module):
    """Attention, then a perceptron, each on a normed input and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH, eps=EPSILON), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in made)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(x)
        return out


class VisionTransformer(nn.Module):
    """Images to logits, read off the class token."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.head = nn.Linear(WIDTH, IMAGENET_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.places
        out: Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return out


def vit_large(batch: int, layers: int = LAYERS) -> Workload:
    return image_workload(VisionTransformer(layers), batch, SIDE)
