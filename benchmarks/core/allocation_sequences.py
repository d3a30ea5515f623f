"""The host memory that training steps allocate, as data: sequences of allocations and frees, derived from shapes.

The forward pass allocates in the order in which autograd saves; the backward pass frees in the reverse order. There is
no torch and no device: a sequence is a list of values that drives a pool, or a model of one. Shapes are exact.
Parameters, gradients and workspaces are omitted, because they are never offloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.core.vgg16 import CONVOLUTIONS, POOLED_AFTER

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
INT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class Allocation:
    """The request for a block; `block` names it until its Free."""

    block: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """The return of a block."""

    block: int


Sequenced = list[Allocation | Free]


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder. The defaults are GPT-2 medium's."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 50257


# Tokens per sequence in seven consecutive steps, neither sorted nor round, as in batches of documents.
VARYING_TOKENS = (512, 1024, 384, 731, 1024, 897, 256)


def vgg16_sequence(batch: int, steps: int = 1) -> Sequenced:
    """VGG-16 in float32 on 224 x 224 images: the output map of each convolution, each pooled map, and the int64 indices
    that max pooling saves for its backward pass.
    """
    sizes = []
    for index, convolution in enumerate(CONVOLUTIONS):
        sizes.append(convolution.output_elements * batch * FLOAT32_BYTES)
        if index in POOLED_AFTER:
            pooled = convolution.output_elements // 4 * batch
            sizes += [pooled * FLOAT32_BYTES, pooled * INT64_BYTES]
    return repeated([sizes] * steps)


def transformer_sequence(
    batch: int,
    tokens: Sequence[int],
    sizes: Transformer = Transformer(),
) -> Sequenced:
    """A decoder in bfloat16, one step for each entry of `tokens`, the sequence length of that step."""
    return repeated([_transformer_step(batch, length, sizes) for length in tokens])


def repeated(steps: Sequence[Sequence[int]]) -> Sequenced:
    """Each step allocates its sizes in order and frees them in reverse."""
    sequence: Sequenced = []
    first = 0
    for sizes in steps:
        blocks = range(first, first + len(sizes))
        sequence += [Allocation(block, size) for block, size in zip(blocks, sizes, strict=True)]
        sequence += [Free(block) for block in reversed(blocks)]
        first = blocks.stop
    return sequence


def requested_peak_bytes(sequence: Sequenced) -> int:
    """The most bytes that are allocated at any point of the sequence."""
    live: dict[int, int] = {}
    now = peak = 0
    for item in sequence:
        if isinstance(item, Allocation):
            live[item.block] = item.bytes
            now += item.bytes
            peak = max(peak, now)
        else:
            now -= live.pop(item.block)
    return peak


def _transformer_step(batch: int, tokens: int, sizes: Transformer) -> list[int]:
    """The sizes of what autograd saves: the inputs of layer norms with their float32 statistics, of matrix products and
    of GELU; q, k and v; attention's output and its log-sum-exp; and at the end the logits in float32.
    """
    rows = batch * tokens
    statistics = rows * FLOAT32_BYTES
    wide = rows * sizes.hidden * BFLOAT16_BYTES
    norm = [wide, statistics, statistics, wide]
    attention = [3 * wide, wide, batch * sizes.heads * tokens * FLOAT32_BYTES]
    feed_forward = [4 * wide, 4 * wide]
    layer = [*norm, *attention, *norm, *feed_forward]
    head = [*norm, rows * sizes.vocabulary * FLOAT32_BYTES]
    return layer * sizes.layers + head
