"""Advice on settings of convolutions that the advisor does not rehearse: the memory layout and the algorithm."""

from __future__ import annotations

import torch

from vdnn.advisor.advice import Advice, Kind, unknown
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.hardware import HardwareProfile
from vdnn.hardware.operation_classes import LAYOUT_CONVERSION

_NOT_CHARGED = "this card's profile does not charge for layouts; on tensor cores channels_last saves transposes"
_NOT_REHEARSED = "the inputs' layout is the program's; virtual time charges for converting maps, so rehearse it changed"
_NO_ALGORITHMS = "virtual time charges the arithmetic of a convolution, not its algorithm"
_FEWEST_STEPS = 2
_BY_LANES = 2.5


def channels_last(evidence: Evidence) -> list[Advice]:
    """Advice for convolutions in two or three dimensions, on a card with tensor cores."""
    weights = evidence.base.convolution_weights
    if weights is None or not weights.channels_first or not _has_tensor_cores(evidence.profile):
        return []
    charges = LAYOUT_CONVERSION in evidence.profile.efficiency
    return [
        Advice(
            Kind.CHANNELS_LAST,
            f"{weights.channels_first} of {weights.total} weights of convolutions are stored channels first.",
            f"model.to(memory_format=torch.{weights.layout}), and the inputs too",
            unknown(_NOT_REHEARSED if charges else _NOT_CHARGED),
        )
    ]


def cudnn_benchmark(evidence: Evidence) -> list[Advice]:
    """Advice only if all batches had one shape: cudnn runs its trials again for each new shape."""
    if not evidence.base.convolutions or torch.backends.cudnn.benchmark or torch.backends.cudnn.deterministic:
        return []
    observed = evidence.real
    if observed.steps < _FEWEST_STEPS:
        raise NotSeen("one step does not show whether shapes vary")
    if observed.shapes > 1:
        return []
    return [
        Advice(
            Kind.CUDNN_BENCHMARK,
            f"{evidence.base.convolutions} convolutions run in a step, forward and backward, and inputs had the same "
            f"shape in all {observed.steps} steps.",
            "torch.backends.cudnn.benchmark = True",
            unknown(_NO_ALGORITHMS),
        )
    ]


def _has_tensor_cores(profile: HardwareProfile) -> bool:
    """A card without tf32 and bfloat16 has tensor cores if float16 is more than 2.5 times as fast as float32: wider
    lanes alone make it twice as fast."""
    rates = profile.flop_per_s
    return "tf32" in rates or "bfloat16" in rates or rates.get("float16", 0) > _BY_LANES * rates["float32"]
