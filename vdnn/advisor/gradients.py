"""Advice on unnecessary gradient work: filling gradients with zeros, and biases that a batch norm cancels."""

from __future__ import annotations

from dataclasses import replace

from vdnn.advisor.advice import Advice, Kind, unknown
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.bytesize import format_bytes

_NAMED = 3
_AT_LEAST = "two rehearsals, in which a bias is part of its convolution; more if it runs as a kernel of its own"


def filled_gradients(evidence: Evidence) -> list[Advice]:
    """Advice only for a step of the user's own: without one, the advisor clears the gradients."""
    if evidence.training.can_be_cut:
        raise NotSeen("the advisor clears gradients itself if no step is given")
    base = evidence.base
    if not base.filled_gradients:
        return []
    seen = f"{base.filled_gradients} gradients of {format_bytes(base.filled_bytes)} are filled with zeros in each step."
    gain = evidence.gain_of(Change(set_to_none=True), "with gradients set to None")
    if gain.saved_ns == 0 and gain.saved_bytes == 0:
        action = "parameter.grad = None in place of parameter.grad.zero_()"
        reason = "the program fills them without zero_grad, and a rehearsal cannot skip that"
        return [Advice(Kind.SET_TO_NONE, seen, action, unknown(reason))]
    if not gain.is_one:
        return []
    return [Advice(Kind.SET_TO_NONE, seen, "optimizer.zero_grad(set_to_none=True), which is torch's default", gain)]


def biases_before_norms(evidence: Evidence) -> list[Advice]:
    pairs = evidence.base.norm_biases
    if not pairs:
        return []
    gain = evidence.gain_of(Change(without_biases=tuple(sorted({bias for bias, _ in pairs}))), "without those biases")
    if not gain.is_one:
        return []
    gain = replace(gain, reason=_AT_LEAST)
    names = [bias.rpartition(".")[0] for bias, _ in pairs]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    first, norm = pairs[0][0].rpartition(".")[0], pairs[0][1]
    followed = f"{first} by {norm}" if norm else f"{first} by a batch norm without weights"
    plural = "biases are" if len(names) > 1 else "bias is"
    return [
        Advice(
            Kind.BIAS_BEFORE_NORM,
            f"{len(names)} {plural} cancelled by the batch norm that follows: "
            f"{', '.join(names[:_NAMED])}{more} ({followed}).",
            "bias=False in those layers",
            gain,
        )
    ]
