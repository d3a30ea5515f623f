"""What training steps ask host memory for, as data: sequences of allocations and frees, derived from shapes.

Forward allocates in the order in which autograd saves; backward frees in the reverse order. No torch and no
device: a sequence is a list of values that a pool, or a model of one, is driven with. Shapes are exact; what
is left out (parameters, gradients, workspaces) is never offloaded.
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
    """A block is asked for; `block` names it until its Free."""

    block: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """The block is given back."""

    block: int


Sequenced = list[Allocation | Free]


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder: the default is GPT-2 medium's."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 50257


# Tokens per sequence of seven consecutive steps, as batches of documents have them: neither sorted nor round.
VARYING_TOKENS = (512, 1024, 384, 731, 1024, 897, 256)


def vgg16_sequence(batch: int, steps: int = 1) -> Sequenced:
    """VGG-16 in float32 on 224 x 224 images: every map behind a convolution, every pooled map and the int64
    indices that max pooling keeps for its backward.
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
    """The most that is asked for and not given back at any point."""
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
    """What autograd saves: the inputs of the layer norms with their float32 statistics, of the matrix products
    and of GELU; q, k and v; attention's output and its log-sum-exp; at the end the logits in float32.
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
