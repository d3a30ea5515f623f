"""Networks of diffusers, with inputs of one small image or clip each. Sizes are those of small test networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.drawn_models import of_diffusers

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 64}
_OPTIONS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {"block_out_channels": (32, 64, 64, 64), "norm_num_groups": 8, "sample_size": 32},
    "UNet2DConditionModel": {
        "block_out_channels": (32, 64, 64, 64),
        "norm_num_groups": 8,
        "sample_size": 32,
        "cross_attention_dim": 64,
    },
    "AutoencoderKL": {"norm_num_groups": 8, "block_out_channels": (32,)},
    "AutoencoderTiny": {},
    "VQModel": {"norm_num_groups": 8},
    "DiTTransformer2DModel": {**_HEADS, "num_layers": 2},
    "PixArtTransformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "cross_attention_dim": 256,
        "caption_channels": 64,
        "sample_size": 32,
    },
    "SD3Transformer2DModel": {**_HEADS, "num_layers": 2, "caption_projection_dim": 256, "joint_attention_dim": 64},
    "FluxTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 128,
        "num_layers": 2,
        "num_single_layers": 2,
    },
    "WanTransformer3DModel": {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 2, "ffn_dim": 512},
    "CogVideoXTransformer3DModel": {**_HEADS, "num_layers": 2, "sample_height": 16, "sample_width": 16},
    "LTXVideoTransformer3DModel": {**_HEADS, "num_layers": 2, "cross_attention_dim": 256},
    "SanaTransformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 64,
        "cross_attention_dim": 256,
        "caption_channels": 64,
    },
}


def subjects() -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name. Raises ImportError where diffusers is not installed."""
    import diffusers  # noqa: F401

    return {f"diffusers/{name}": of_diffusers.built(name, options) for name, options in _OPTIONS.items()}
