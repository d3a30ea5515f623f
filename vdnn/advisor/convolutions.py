"""Settings of convolutions that virtual time has no price for: how pictures lie in memory, and the algorithm."""

from __future__ import annotations

import torch

from vdnn.advisor.advice import Advice, Kind, unknown
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.hardware import HardwareProfile

_NO_LAYOUTS = "virtual time charges bytes and arithmetic, and knows no layouts; on tensor cores it spares transposes"
_NO_ALGORITHMS = "virtual time knows the arithmetic of a convolution, not its algorithms"
_FEWEST_SHAPES = 2
_BY_LANES = 2.5


def channels_last(evidence: Evidence) -> list[Advice]:
    """Of convolutions in two or three dimensions, on a card with tensor cores."""
    weights = evidence.base.convolution_weights
    if weights is None or not weights.channels_first or not _has_tensor_cores(evidence.profile):
        return []
    return [
        Advice(
            Kind.CHANNELS_LAST,
            f"{weights.channels_first} of {weights.total} weights of convolutions lie channels first in memory.",
            f"model.to(memory_format=torch.{weights.layout}), and the inputs too",
            unknown(_NO_LAYOUTS),
        )
    ]


def cudnn_benchmark(evidence: Evidence) -> list[Advice]:
    """Only where all batches had one shape: for each new one the trials are made again."""
    if not evidence.base.convolutions or torch.backends.cudnn.benchmark or torch.backends.cudnn.deterministic:
        return []
    observed = evidence.real
    if observed.steps < _FEWEST_SHAPES:
        raise NotSeen("one step does not tell whether shapes vary")
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
    """Where the only half is float16: if it is more than twice as fast, which wider lanes alone make it."""
    rates = profile.flop_per_s
    return "tf32" in rates or "bfloat16" in rates or rates.get("float16", 0) > _BY_LANES * rates["float32"]
