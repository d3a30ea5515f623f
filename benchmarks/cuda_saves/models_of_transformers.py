"""Thirty models of transformers, smaller than their defaults where that leaves their structure as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TOKENS = 128
_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
_DECODERS = (
    "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Phi Phi3 GPT2 GPTNeoX OPT Bloom Falcon StableLm Olmo2 Cohere "
    "Mixtral Qwen2Moe"
)
_ENCODERS = "Bert Roberta DistilBert Albert Electra DebertaV2 ModernBert"
_VISION = "ViT ConvNext Swin ResNet Dinov2"
_MODEL_NAMES = {"GPT2ForCausalLM": "GPT2LMHeadModel"}


def subjects() -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name. Raises ImportError where transformers is not installed."""
    import transformers

    found: dict[str, Callable[[int], Any]] = {}
    for name in _DECODERS.split():
        found[name] = _of_tokens(transformers, name, "ForCausalLM")
    for name in _ENCODERS.split():
        found[name] = _of_tokens(transformers, name, "ForSequenceClassification")
    for name in _VISION.split():
        found[name] = _of_images(transformers, name)
    found["T5"] = _translated(transformers)
    return found


def _of_tokens(transformers: Any, name: str, task: str) -> Callable[[int], Any]:
    is_decoder = task == "ForCausalLM"

    def build(batch: int) -> Any:
        config = _config(transformers, name)
        model = getattr(transformers, _MODEL_NAMES.get(name + task, name + task))(config)
        if is_decoder:
            model = model.to(torch.bfloat16)
        tokens = torch.randint(3, config.vocab_size, (batch, TOKENS))
        if is_decoder:
            return model, {"input_ids": tokens, "labels": tokens}
        labels = torch.zeros(batch, dtype=torch.int64)
        return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    return build


def _config(transformers: Any, name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(pad_token_id=0)
    for option, value in _SMALL.items():
        # Some names are read-only aliases of other options: such a model keeps its defaults.
        if name not in ("DistilBert", "Albert", "GPT2") and option in vars(config):
            setattr(config, option, value)
    for option in ("num_hidden_layers", "n_layers", "n_layer"):
        if option in vars(config):
            setattr(config, option, 2)
    if "head_dim" in vars(config):
        config.head_dim = 32
    if vars(config).get("num_key_value_heads") is not None:
        config.num_key_value_heads = 4
    if vars(config).get("layer_types") is not None:
        config.layer_types = config.layer_types[:2]
    if "pooler_hidden_size" in vars(config):
        config.pooler_hidden_size = config.hidden_size
    config._experts_implementation = "eager"  # the others ask for the card's generation
    return config


def _of_images(transformers: Any, name: str) -> Callable[[int], Any]:
    def build(batch: int) -> Any:
        config = getattr(transformers, f"{name}Config")()
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        size = getattr(config, "image_size", 224)
        return model, {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.zeros(batch).long()}

    return build


def _translated(transformers: Any) -> Callable[[int], Any]:
    def build(batch: int) -> Any:
        config = transformers.T5Config(num_layers=2, decoder_start_token_id=0)
        tokens = torch.randint(config.vocab_size, (batch, TOKENS))
        return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}

    return build
