"""Advice on host syncs: each line at which a step makes the host wait for the GPU, with what to write instead."""

from __future__ import annotations

from vdnn.advisor.advice import Advice, Basis, Gain, Kind, unknown
from vdnn.advisor.evidence import Evidence
from vdnn.advisor.host_syncs import SCALER, HostSync

_SHAPED = "torch.where or a product with the mask, whose size does not depend on data"
_INSTEAD = {
    SCALER: "bfloat16 in place of float16, where the card has it: it needs no scaler",
    ".item()": "keep the tensor (`total += loss.detach()`) and read it once in many steps",
    "float(tensor)": "keep the tensor (`total += loss.detach()`) and read it once in many steps",
    "int(tensor)": "keep the number on the card, or compute it from shapes",
    "bool(tensor)": "torch.where in place of the branch, or look once in many steps",
    "an index that is a mask": _SHAPED,
    "nonzero()": _SHAPED,
    "masked_select()": _SHAPED,
    "repeat_interleave()": "repeat_interleave(..., output_size=n)",
    "torch.cuda.synchronize()": "leave it out: torch keeps the order of kernels by itself",
    "printing a tensor": "print once in many steps",
    "formatting a tensor": "log once in many steps",
}
_COPIED = 'tensor.to("cpu", non_blocking=True), and read it a step later'
_UNPREDICTED = "it costs the time by which the host is ahead of the card, which virtual time does not model"


def host_waits(evidence: Evidence) -> list[Advice]:
    """Advice for each host sync of the real steps, or of the rehearsal if there were none."""
    observed = evidence.observed
    syncs = observed.syncs if observed is not None and observed.steps else evidence.base.syncs
    return [_advice(evidence, sync) for sync in sorted(syncs, key=lambda one: (-one.waited_ns, -one.count, one.place))]


def _advice(evidence: Evidence, sync: HostSync) -> Advice:
    times = "once" if sync.count == 1 else f"{sync.count} times"
    gain = unknown(_UNPREDICTED)
    step_ns = None if evidence.observed is None else evidence.observed.step_ns
    if sync.waited_ns and step_ns:
        reason = "how long the host waited there, of which at most all is gained"
        gain = Gain(Basis.MEASURED, reason, before_ns=step_ns, after_ns=max(0, step_ns - sync.waited_ns))
    return Advice(
        Kind.HOST_SYNC,
        f"{sync.call} at {sync.place} makes the host wait for the card {times} in each step.",
        _INSTEAD.get(sync.call, _COPIED),
        gain,
    )
