"""Trainings of decoder models, computed from their published configurations.

[Note: Formulas] For T tokens in sequences of s, hidden size h, keys and values of k in total, a feed-forward of f and a
vocabulary of V, in bfloat16:

* weights of a block: h(q + 2k) + qh + 3hf, or 4hh + 2hf without a gate, where q is the size of all queries;
* forward: 2 FLOPs a token for each weight of a product, and 2sq for causal attention;
* backward: twice as much, or once as much where the weights are frozen and only inputs get gradients;
* saved by a block, in elements a token: 4h + 2q + 2k + 4f with a gate, 5h + 2q + 2k + 2f without one: the inputs of
  norms and products, queries, keys, values and the output of attention, and what the activation function saves. Of
  these, a recompute needs the input, h;
* the head computes logits and loss in chunks of 2,048 tokens, 10 bytes for each logit, and saves its input;
* while backward runs in a block, the gradients of its widest part are there too: 2 bytes for h + 2f elements a token;
* AdamW with float32 master weights: 12 bytes of state a parameter. Its step on the device reads and writes 28 bytes a
  parameter in the device's memory, and on the CPU 28 in the host's.

A table that is used at both ends of a model is in the head. LoRA has adapters of rank r at all products of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.whole_state.machines import Machine
from vdnn.planning.training.training import Training, Unit

_CHUNK_TOKENS = 2048
_BF16 = 2


@dataclass(frozen=True, slots=True)
class Decoder:
    """A configuration, in the words of the files that models are published with. `lora_rank`: 0 trains all weights."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    is_tied: bool
    is_gated: bool = True
    sequence: int = 4096
    lora_rank: int = 0

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_value_heads * self.head_size

    @property
    def block_weights(self) -> int:
        products = 3 if self.is_gated else 2
        return self.hidden * (2 * self.queries + 2 * self.keys + products * self.feed_forward)

    @property
    def block_adapters(self) -> int:
        """Weights of the adapters of a block: rank times inputs and outputs of each product."""
        widths = [(self.hidden, self.queries), (self.queries, self.hidden)]
        widths += [(self.hidden, self.keys)] * 2 + [(self.hidden, self.feed_forward)] * (2 if self.is_gated else 1)
        widths += [(self.feed_forward, self.hidden)]
        return self.lora_rank * sum(into + out for into, out in widths)

    @property
    def table_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.layers * self.block_weights + self.table_weights * (1 if self.is_tied else 2)


MODELS = (
    Decoder("GPT-2 XL", 48, 1600, 25, 25, 64, 6400, 50257, True, is_gated=False, sequence=1024),
    Decoder("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True),
    Decoder("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, True),
    Decoder("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True),
    Decoder("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32768, False),
    Decoder("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False),
    Decoder("Qwen3-14B LoRA", 40, 5120, 40, 8, 128, 17408, 151936, False, lora_rank=16),
    Decoder("Llama-3.1-70B LoRA", 80, 8192, 64, 8, 128, 28672, 128256, False, lora_rank=16),
)


def model_named(name: str) -> Decoder:
    return next(model for model in MODELS if model.name == name)


def training_of(
    model: Decoder, machine: Machine, tokens: int, micro_batches: int = 1, *, clips: bool = True
) -> Training:
    """A step of `tokens` in so many micro-batches. See [Note: Formulas]."""
    part = tokens // micro_batches
    trained = not model.lora_rank
    table = _unit(model, machine, "embedding", model.table_weights, 0, trained=trained)
    units = [] if model.is_tied else [table]
    units += [_block(model, machine, part, f"block {index}") for index in range(model.layers)]
    units.append(_head(model, machine, part))
    method = f"LoRA of rank {model.lora_rank}" if model.lora_rank else "AdamW"
    name = f"{model.name.removesuffix(' LoRA')}, {method}, {tokens} tokens"
    return Training(name, tuple(units), micro_batches, clips=clips)


def recomputed_ns(training: Training) -> int:
    """The time of forward, which is added where everything is recomputed."""
    return training.micro_batches * sum(unit.forward_ns for unit in training.units)


def _block(model: Decoder, machine: Machine, tokens: int, name: str) -> Unit:
    h, q, k, f = model.hidden, model.queries, model.keys, model.feed_forward
    saved = 4 * h + 2 * q + 2 * k + 4 * f if model.is_gated else 5 * h + 2 * q + 2 * k + 2 * f
    products, attention = 2 * model.block_weights, 2 * model.sequence * q
    adapters = 2 * model.block_adapters
    backward = products + 2 * adapters if model.lora_rank else 2 * products
    return _unit(
        model,
        machine,
        name,
        0 if model.lora_rank else model.block_weights,
        model.block_adapters,
        frozen_weights=model.block_weights if model.lora_rank else 0,
        trained=True,
        saved_bytes=_BF16 * saved * tokens,
        boundary_bytes=_BF16 * h * tokens,
        forward=float(products + adapters + attention) * tokens,
        backward=float(backward + 2 * attention) * tokens,
        backward_transient_bytes=_BF16 * (h + 2 * f) * tokens,
    )


def _head(model: Decoder, machine: Machine, tokens: int) -> Unit:
    products = 2 * model.table_weights
    chunk_bytes = min(tokens, _CHUNK_TOKENS) * model.vocabulary * 10
    return _unit(
        model,
        machine,
        "head",
        model.table_weights,
        0,
        trained=not model.lora_rank,
        saved_bytes=_BF16 * model.hidden * tokens,
        boundary_bytes=_BF16 * model.hidden * tokens,
        forward=float(products) * tokens,
        backward=float(products if model.lora_rank else 2 * products) * tokens,
        forward_transient_bytes=chunk_bytes,
        backward_transient_bytes=chunk_bytes,
    )


def _unit(
    model: Decoder,
    machine: Machine,
    name: str,
    weights: int,
    adapters: int,
    *,
    trained: bool,
    frozen_weights: int = 0,
    saved_bytes: int = 0,
    boundary_bytes: int = 0,
    forward: float = 0.0,
    backward: float = 0.0,
    forward_transient_bytes: int = 0,
    backward_transient_bytes: int = 0,
) -> Unit:
    """`forward` and `backward` are FLOPs."""
    moving = (weights if trained else 0) + adapters
    frozen = frozen_weights + (0 if trained else weights)
    return Unit(
        name=name,
        weight_bytes=_BF16 * moving,
        frozen_bytes=_BF16 * frozen,
        gradient_bytes=_BF16 * moving,
        state_bytes=12 * moving,
        saved_bytes=saved_bytes,
        boundary_bytes=boundary_bytes,
        forward_ns=round(forward / machine.flops_per_s * 1e9),
        backward_ns=round(backward / machine.flops_per_s * 1e9),
        forward_transient_bytes=forward_transient_bytes,
        backward_transient_bytes=backward_transient_bytes,
        step_ns=round(28 * moving / machine.memory_bytes_per_s * 1e9),
        host_step_bytes=28 * moving,
    )
