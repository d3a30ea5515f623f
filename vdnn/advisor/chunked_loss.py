"""Advises torch's own loss in chunks where the logits of a large vocabulary are a part of the peak."""

from __future__ import annotations

from torch import nn

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.bytesize import format_bytes

# A loss in chunks is another loss to write, and takes longer: it has to save this share of the peak.
_WORTH_BYTES = 0.1
# Fewer chunks leave more of the logits, and more of them take longer: each adds to the whole gradient of the weight.
_CHUNKS = 8


def chunked_loss(evidence: Evidence) -> list[Advice]:
    """Advice where the logits are the peak, also for a step that fits: a larger batch then takes their place."""
    if not hasattr(nn, "LinearCrossEntropyLoss"):
        raise NotSeen("this torch has no LinearCrossEntropyLoss: torch 2.13 does")
    base = evidence.base
    if base.logits_bytes < _WORTH_BYTES / 2 * base.peak_bytes:
        return []
    rows = max(1, -(-base.logits_rows // _CHUNKS))
    gain = evidence.gain_of(Change(loss_chunk_rows=rows), "with the loss in chunks")
    if gain.saved_bytes_share < _WORTH_BYTES:
        return []
    options = f"options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size={rows}, chunking_method=None)"
    return [
        Advice(
            Kind.CHUNKED_LOSS,
            f"the logits of {base.logits_classes} classes take {format_bytes(base.logits_bytes)}, their gradient takes "
            "as much, and both are a part of the peak.",
            f"torch.nn.LinearCrossEntropyLoss({base.logits_features}, {base.logits_classes}, {options})(hidden, "
            "target) in place of that linear and cross_entropy",
            gain,
        )
    ]
