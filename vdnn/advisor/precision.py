"""Advice on products in float32 on a card that is faster with a smaller type: autocast, or tf32."""

from __future__ import annotations

import torch

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence

_FLOAT32 = "float32"


def mixed_precision(evidence: Evidence) -> list[Advice]:
    """Advice for cards that have a rate for bfloat16 or float16. Other cards would only convert."""
    dtype = next((one for one in ("bfloat16", "float16") if one in evidence.profile.flop_per_s), None)
    products = dict(evidence.base.products)
    count = products.get(_FLOAT32, 0)
    if dtype is None or not count:
        return []
    gain = evidence.gain_of(Change(autocast=dtype), f"with autocast to {dtype}")
    if not gain.is_worth_a_line:
        return []
    total = sum(products.values())
    scaler = "" if dtype == "bfloat16" else " (and a torch.amp.GradScaler around the backward pass: float16 underflows)"
    return [
        Advice(
            Kind.AMP,
            f"{count} of {total} products and convolutions of a step run in float32; {evidence.profile.name} "
            f"does {dtype} at {_times(evidence, dtype)} the rate.",
            f'with torch.autocast("cuda", torch.{dtype}): around the forward pass and the loss{scaler}',
            gain,
        )
    ]


def tf32_products(evidence: Evidence) -> list[Advice]:
    """Advice on matrix products. Convolutions use tf32 by default; products use it only if the program allows it."""
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    count = evidence.base.products_tf32_could_take
    if allowed or not count or "tf32" not in evidence.profile.flop_per_s:
        return []
    gain = evidence.gain_of(Change(tf32=True), "with tf32 products")
    if not gain.is_worth_a_line:
        return []
    return [
        Advice(
            Kind.TF32,
            f"{count} matrix products of a step run in float32 at full precision; {evidence.profile.name} does tf32 "
            f"at {_times(evidence, 'tf32')} the rate.",
            'torch.set_float32_matmul_precision("high"); nothing more to win under autocast',
            gain,
        )
    ]


def _times(evidence: Evidence, dtype: str) -> str:
    rates = evidence.profile.flop_per_s
    return f"{rates[dtype] / rates[_FLOAT32]:.3g} times"
