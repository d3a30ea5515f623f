"""Advice on the optimizer: its fused form, and its state in 8 bits."""

from __future__ import annotations

import importlib.util

from vdnn.advisor.advice import Advice, Basis, Gain, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.optimizer_state import OptimizerForm
from vdnn.bytesize import format_bytes

# Libraries in the order of preference: package, module, and its optimizers by the names of torch's.
_IN_8_BITS = (
    ("bitsandbytes", "bitsandbytes.optim", {"Adam": "Adam8bit", "AdamW": "AdamW8bit"}),
    ("torchao", "torchao.optim", {"Adam": "Adam8bit", "AdamW": "AdamW8bit"}),
)
# Below this share of the peak the saved bytes do not justify another dependency.
_WORTH_A_LIBRARY = 0.02


def fused_form(evidence: Evidence) -> list[Advice]:
    form = _form(evidence)
    if not form.can_fuse or form.is_fused:
        return []
    gain = evidence.gain_of(Change(fused=True), "with a fused optimizer")
    if not gain.is_worth_a_line:
        return []
    way = "one parameter after the other (foreach=False)" if form.is_loop else "in lists, one kernel for each operation"
    return [
        Advice(
            Kind.OPTIMIZER_FORM,
            f"{form.name} updates {form.parameters} parameters {way}.",
            f"torch.optim.{form.name}(..., fused=True)",
            gain,
        )
    ]


def state_in_8_bits(evidence: Evidence) -> list[Advice]:
    """The state is always resident, so the peak falls by as many bytes as the state does."""
    form = _form(evidence)
    saved_bytes = form.state_bytes - form.bytes_in_8_bits
    before_bytes = evidence.base.peak_bytes
    known = [one for one in _IN_8_BITS if form.name in one[2]]
    if not known or saved_bytes < _WORTH_A_LIBRARY * before_bytes:
        return []
    installed = [one for one in known if importlib.util.find_spec(one[0]) is not None]
    library, module, names = (installed or known)[0]
    has_it = "" if installed else f" (pip install {library}: it is not installed here)"
    takes, share = format_bytes(form.state_bytes), form.state_bytes / before_bytes
    gain = Gain(
        Basis.PREDICTED,
        "a byte for each number of the state and a scale for each 256; time not predicted",
        before_bytes=before_bytes,
        after_bytes=before_bytes - saved_bytes,
    )
    return [
        Advice(
            Kind.OPTIMIZER_STATE,
            f"{form.name} keeps {takes} of state, {share:.0%} of the peak.",
            f"{module}.{names[form.name]}(...) in place of torch.optim.{form.name}{has_it}",
            gain,
        )
    ]


def _form(evidence: Evidence) -> OptimizerForm:
    form = evidence.base.optimizer
    if form is None:
        raise NotSeen("no optimizer was given")
    return form
