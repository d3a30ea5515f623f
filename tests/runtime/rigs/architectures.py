"""Architectures from transformers, each tiny and with random weights: a configuration, a model and its inputs.

Nothing is downloaded. Each has two layers, 32 wide, for 8 tokens or images of 16 x 16. A step takes about ten
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Inputs = dict[str, Any]
VOCABULARY = 64
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_DECODER, "num_key_value_heads": 2}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_MOE = {"num_experts_per_tok": 2, "output_router_logits": True}
_PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_SIDES = {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
}  #


def _tokens(count: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, count))


def _text() -> Inputs:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _image(size: int = 16) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def _large_image() -> Inputs:
    return _image(32)


def _pixels() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def _image_and_text() -> Inputs:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def _spectrogram() -> Inputs:
    return {"input_features": torch.randn(2, 8, 32), "labels": _tokens(6)}


def _waveform() -> Inputs:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 20, (2, 4))}


_Spec = tuple[str, str, dict[str, Any], Callable[[], Inputs]]
_SPECS: dict[str, _Spec] = {
    # Decoders.
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT, _text),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}, _text),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        _text,
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER, _text),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
        _text,
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        _text,
    ),
    "falcon": ("FalconConfig", "FalconForCausalLM", _DECODER, _text),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA, _text),
    "mistral": ("MistralConfig", "MistralForCausalLM", _LLAMA, _text),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_LLAMA, "head_dim": 8}, _text),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}, _text),
    "phi": ("PhiConfig", "PhiForCausalLM", _LLAMA, _text),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _LLAMA, _text),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _LLAMA, _text),
    # Mixtures of experts.
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_LLAMA, **_MOE, "num_local_experts": 4}, _text),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_LLAMA, **_MOE, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        _text,
    ),
    # State-space models and similar ones.
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
        _text,
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        _text,
    ),
    "rwkv": (
        "RwkvConfig",
        "RwkvForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "context_length": 16,
        },
        _text,
    ),
    # Encoders.
    "bert": ("BertConfig", "BertForMaskedLM", _DECODER, _text),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _DECODER, _text),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**_DECODER, "embedding_size": 16}, _text),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_DECODER, "embedding_size": 16}, _text),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", _DECODER, _text),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**_DECODER, "cls_token_id": 1, "sep_token_id": 2},
        _text,
    ),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
        },
        _text,
    ),
    # Encoders with decoders.
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        _text,
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 32, **_SIDES},
        _text,
    ),
    # Vision.
    "vit": ("ViTConfig", "ViTForImageClassification", _PATCHES, _image),
    "vit_mae": (
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        {
            **_PATCHES,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        _pixels,
    ),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "window_size": 4,
            "depths": [1, 1],
            "num_heads": [2, 4],
        },
        _image,
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 12, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32},
        _large_image,
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        _image,
    ),
    "segformer": (
        "SegformerConfig",
        "SegformerForImageClassification",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
        _large_image,
    ),
    # Audio.
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 32,
            **_SIDES,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _spectrogram,
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 20,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "conv_dim": [16, 16],
            "conv_stride": [4, 4],
            "conv_kernel": [8, 4],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "pad_token_id": 0,
            "ctc_loss_reduction": "mean",
        },
        _waveform,
    ),
    # Two towers.
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {"text_config": _DECODER, "vision_config": _PATCHES, "projection_dim": 16},
        _image_and_text,
    ),
    "siglip": ("SiglipConfig", "SiglipModel", {"text_config": _DECODER, "vision_config": _PATCHES}, _image_and_text),
}

NAMES = tuple(_SPECS)


def build(name: str) -> tuple[torch.nn.Module, Inputs]:
    """The architecture in training mode, and inputs for which it gives a loss. Skips the test without transformers,
    which is imported here: collecting tests must not wait for it."""
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config, model, options, inputs = _SPECS[name]
    # The model may write to its inputs.
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in options.items()}
    made: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**copied))
    return made.train(), inputs()
