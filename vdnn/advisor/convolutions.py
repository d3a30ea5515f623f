"""Advice on settings of convolutions: the memory layout, and the algorithm, which virtual time does not model."""

from __future__ import annotations

import torch

from vdnn.advisor.advice import Advice, Kind, unknown
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.hardware import HardwareProfile
from vdnn.hardware.operation_classes import LAYOUT_CONVERSION

_NO_LAYOUTS = "the hardware profile has no figure for layouts; on tensor cores channels_last saves transposes"
_NO_ALGORITHMS = "virtual time charges the arithmetic of a convolution, not its algorithm"
_FEWEST_STEPS = 2
_BY_LANES = 2.5


def channels_last(evidence: Evidence) -> list[Advice]:
    """Advice for convolutions in two or three dimensions, on a card with tensor cores."""
    weights = evidence.base.convolution_weights
    if weights is None or not weights.channels_first or not _has_tensor_cores(evidence.profile):
        return []
    gain = unknown(_NO_LAYOUTS)
    if LAYOUT_CONVERSION in evidence.profile.efficiency:
        gain = evidence.gain_of(Change(channels_last=True), "weights of convolutions channels last")
    return [
        Advice(
            Kind.CHANNELS_LAST,
            f"{weights.channels_first} of {weights.total} weights of convolutions are stored channels first.",
            f"model.to(memory_format=torch.{weights.layout}), and the inputs too",
            gain,
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
