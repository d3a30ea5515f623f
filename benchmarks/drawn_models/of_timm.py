"""Models of timm, with the input size of their default configuration and without weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch


def drawn(count: int, seed: int) -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name."""
    import timm

    names = random.Random(seed).sample(timm.list_models(), count)
    return {f"timm/{name}": _built(timm, name) for name in names}


def _built(timm: Any, name: str) -> Callable[[int], Any]:
    def build(batch: int) -> Any:
        model = timm.create_model(name, pretrained=False)
        return model, torch.randn(batch, *model.default_cfg["input_size"])

    return build
