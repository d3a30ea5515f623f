"""Advice on the step itself: convolutions, precision, gradients, the loss, the optimizer, waits, debugging tools."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import nn

from vdnn.advisor.advice import Advice, Basis, Gain, Kind, unknown
from vdnn.advisor.change import Change
from vdnn.advisor.diagnostics import TOOLS, tools_that_are_on
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.host_syncs import SCALER, HostSync
from vdnn.advisor.optimizer_state import OptimizerForm
from vdnn.bytesize import format_bytes
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


# Advice on products in float32 on a card that is faster with a smaller type: autocast, or tf32.

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


# Advice on unnecessary gradient work: filling gradients with zeros, and biases that a batch norm cancels.

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


# Advises torch's own loss in chunks where the logits of a large vocabulary are a part of the peak.

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


# Advice on debugging tools that were on while steps ran, or are on now.

_UNPREDICTED = "a tool costs time of the host and of libraries, which virtual time does not model"


def debugging(evidence: Evidence) -> list[Advice]:
    found = set(tools_that_are_on()) if evidence.observed is None else set(evidence.observed.tools)
    return [
        Advice(Kind.DEBUGGING, f"{tool} is on during the step.", action, unknown(_UNPREDICTED))
        for tool, action in TOOLS.items()
        if tool in found
    ]


# Advice on the optimizer: its fused form, and its state in 8 bits.

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


# Advice on host syncs: each line at which a step makes the host wait for the GPU, with what to write instead.

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
_UNPREDICTED_WAIT = "it costs the time by which the host is ahead of the card, which virtual time does not model"


def host_waits(evidence: Evidence) -> list[Advice]:
    """Advice for each host sync of the real steps, or of the rehearsal if there were none."""
    observed = evidence.observed
    syncs = observed.syncs if observed is not None and observed.steps else evidence.base.syncs
    return [_advice(evidence, sync) for sync in sorted(syncs, key=lambda one: (-one.waited_ns, -one.count, one.place))]


def _advice(evidence: Evidence, sync: HostSync) -> Advice:
    times = "once" if sync.count == 1 else f"{sync.count} times"
    gain = unknown(_UNPREDICTED_WAIT)
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
