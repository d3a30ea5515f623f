"""Networks of diffusers at the default sizes of their classes, with inputs of one small image or clip each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

TOKENS = 128  # of the text that conditions


def drawn(count: int, seed: int) -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name."""
    names = random.Random(seed).sample(sorted(_INPUTS), count)
    return {f"diffusers/{name}": built(name, {}) for name in names}


def built(name: str, options: dict[str, Any]) -> Callable[[int], Any]:
    """A function of a batch size that makes this network, with its default sizes but for `options`."""

    def build(batch: int) -> Any:
        import diffusers

        model = getattr(diffusers, name)(**options)
        inputs, others = _INPUTS[name](model.config, batch)
        return model, {**inputs, **others}, _first_squared

    return build


def _first_squared(output: Any) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    return first.float().square().mean()  # type: ignore[no-any-return]


_Inputs = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _text(batch: int, width: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(batch, tokens, width)


def _steps(batch: int) -> torch.Tensor:
    return torch.randint(1000, (batch,))


def _unet(config: Any, batch: int) -> _Inputs:
    size = config.sample_size or 64
    return {"sample": torch.randn(batch, config.in_channels, size, size), "timestep": _steps(batch)}, {}


def _conditioned(config: Any, batch: int) -> _Inputs:
    inputs, options = _unet(config, batch)
    return {**inputs, "encoder_hidden_states": _text(batch, config.cross_attention_dim)}, options


def _coder(config: Any, batch: int) -> _Inputs:
    return {"sample": torch.randn(batch, config.in_channels, 256, 256)}, {}


def _map(config: Any, batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, config.in_channels, size, size)


def _dit(config: Any, batch: int) -> _Inputs:
    inputs = {"hidden_states": _map(config, batch, config.sample_size), "timestep": _steps(batch)}
    return {**inputs, "class_labels": torch.randint(1000, (batch,))}, {}


def _pixart(config: Any, batch: int) -> _Inputs:
    inputs = {"hidden_states": _map(config, batch, config.sample_size), "timestep": _steps(batch)}
    text = _text(batch, config.caption_channels or config.cross_attention_dim)
    known = {"resolution": torch.ones(batch, 2), "aspect_ratio": torch.ones(batch, 1)}
    return {**inputs, "encoder_hidden_states": text}, {"added_cond_kwargs": known}


def _sd3(config: Any, batch: int) -> _Inputs:
    inputs = {"hidden_states": _map(config, batch, 64), "timestep": _steps(batch)}
    inputs["encoder_hidden_states"] = _text(batch, config.joint_attention_dim)
    return {**inputs, "pooled_projections": torch.randn(batch, config.pooled_projection_dim)}, {}


def _flux(config: Any, batch: int) -> _Inputs:
    side = 32
    inputs = {"hidden_states": torch.randn(batch, side * side, config.in_channels), "timestep": torch.rand(batch)}
    inputs["encoder_hidden_states"] = _text(batch, config.joint_attention_dim)
    inputs["pooled_projections"] = torch.randn(batch, config.pooled_projection_dim)
    return {**inputs, "img_ids": torch.zeros(side * side, 3), "txt_ids": torch.zeros(TOKENS, 3)}, {}


def _wan(config: Any, batch: int) -> _Inputs:
    inputs = {"hidden_states": torch.randn(batch, config.in_channels, 5, 32, 32), "timestep": _steps(batch)}
    return {**inputs, "encoder_hidden_states": _text(batch, config.text_dim)}, {}


def _cogvideo(config: Any, batch: int) -> _Inputs:
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    video = torch.randn(batch, frames, config.in_channels, config.sample_height, config.sample_width)
    text = _text(batch, config.text_embed_dim, config.max_text_seq_length)
    return {"hidden_states": video, "encoder_hidden_states": text, "timestep": _steps(batch)}, {}


def _ltx(config: Any, batch: int) -> _Inputs:
    inputs = {"hidden_states": torch.randn(batch, 4 * 16 * 16, config.in_channels), "timestep": _steps(batch)}
    inputs["encoder_hidden_states"] = _text(batch, config.caption_channels)
    inputs["encoder_attention_mask"] = torch.ones(batch, TOKENS)
    return inputs, {"num_frames": 4, "height": 16, "width": 16}


def _sana(config: Any, batch: int) -> _Inputs:
    inputs = {"hidden_states": _map(config, batch, 32), "timestep": _steps(batch)}
    return {**inputs, "encoder_hidden_states": _text(batch, config.caption_channels)}, {}


_INPUTS: dict[str, Callable[[Any, int], _Inputs]] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditioned,
    "AutoencoderKL": _coder,
    "AutoencoderTiny": _coder,
    "VQModel": _coder,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "WanTransformer3DModel": _wan,
    "CogVideoXTransformer3DModel": _cogvideo,
    "LTXVideoTransformer3DModel": _ltx,
    "SanaTransformer2DModel": _sana,
}
