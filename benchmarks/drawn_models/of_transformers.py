"""Models of transformers at the default sizes of their configurations, each with the first head of a list."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

TOKENS = 256
_HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
_IN_FLOAT32 = ("xlstm",)  # in bfloat16 their backward pass fails in torch, too
_AS_MANY_AS_DECODED = ("perceiver",)  # its decoder has an output for each position of the longest text
_IN_PATCHES = ("siglip2",)  # its images come as patches, with their number in each direction
_IMAGE = 224  # where a configuration names no size of its images


def drawn(count: int, seed: int) -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name, for `count` types of models."""
    heads = heads_by_type()
    names = random.Random(seed).sample(sorted(heads), count)
    return {f"transformers/{name} {heads[name][1]}": of_type(name, *heads[name]) for name in names}


def heads_by_type() -> dict[str, tuple[str, str]]:
    """The task and the class of the head, by type of model. Types that join others have no default of their own."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for task in _HEADS:
        for name, head in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if "encoder-decoder" not in name:
                found.setdefault(name, (task, head if isinstance(head, str) else head[0]))
    return found


def of_type(name: str, task: str, head: str) -> Callable[[int], Any]:
    """A model of this type with this head."""

    def build(batch: int) -> Any:
        import transformers

        model = getattr(transformers, head)(_config(transformers, name))
        if task == "CAUSAL_LM" and name not in _IN_FLOAT32:
            model = model.to(torch.bfloat16)
        if name in _IN_PATCHES:
            return model, _patches(model, batch)
        return model, _images(model, batch) if task == "IMAGE_CLASSIFICATION" else _tokens(model, name, task, batch)

    return build


def _config(transformers: Any, name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]()
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    config.decoder_start_token_id, config.use_cache = 0, False  # as in training
    return config


def _tokens(model: Any, name: str, task: str, batch: int) -> dict[str, Any]:
    text = model.config.get_text_config()
    count = text.max_position_embeddings if name in _AS_MANY_AS_DECODED else TOKENS
    tokens = torch.randint(3, text.vocab_size, (batch, count))
    labels = torch.zeros(batch, dtype=torch.int64) if task == "SEQUENCE_CLASSIFICATION" else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _images(model: Any, batch: int) -> dict[str, Any]:
    size = getattr(model.config, "image_size", None) or _IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(model.config, "num_channels", 3)
    return {"pixel_values": torch.randn(batch, channels, height, width), "labels": torch.zeros(batch).long()}


def _patches(model: Any, batch: int) -> dict[str, Any]:
    """Square images of as many patches as the model has positions."""
    vision = model.config.vision_config
    side = math.isqrt(vision.num_patches)
    return {
        "pixel_values": torch.randn(batch, side * side, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(batch, side * side, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[side, side]] * batch),
        "labels": torch.zeros(batch).long(),
    }
