"""Models of timm, with the input size of their default configuration and without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMES = (
    "beit_base_patch16_224 cait_xxs24_224 coat_tiny convmixer_768_32 convnextv2_tiny crossvit_tiny_240 cspresnet50 "
    "davit_tiny deit3_small_patch16_224 dpn68 edgenext_small efficientnet_b0 eva02_tiny_patch14_224 focalnet_tiny_srf "
    "ghostnet_100 hrnet_w18 inception_next_tiny levit_128s maxvit_tiny_tf_224 mixer_s16_224 mobilenetv3_large_100 "
    "mobilevit_s nfnet_f0 poolformer_s12 pvt_v2_b0 regnety_008 res2net50_26w_4s resnext50_32x4d rexnet_100 "
    "swinv2_tiny_window8_256 tnt_s_patch16_224 twins_svt_small vit_small_patch16_224 xcit_nano_12_p16_224"
)


def subjects() -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name. Raises ImportError where timm is not installed."""
    import timm

    return {f"timm/{name}": _built(timm, name) for name in _NAMES.split()}


def _built(timm: Any, name: str) -> Callable[[int], Any]:
    def build(batch: int) -> Any:
        model = timm.create_model(name, pretrained=False)
        return model, torch.randn(batch, *model.default_cfg["input_size"])

    return build
