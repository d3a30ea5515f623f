"""torch.utils.checkpoint of every block, not re-entrant: recomputing everything, or selectively keeping products.

Blocks are the outermost modules of the workload's classes. A chain of n layers without such classes (VGG) is divided
into about sqrt(n) segments. Each segment begins with a layer that has weights: an in-place ReLU would write into
the input that the segment keeps. Selective checkpointing keeps the results of matrix products, convolutions and
attention.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.harness.places import MachinePlace, Place
from benchmarks.peers.peer import CannotRun, Opened, Peer, Trial
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Recomputed = Callable[..., Any]

_aten = torch.ops.aten
KEPT_OPERATIONS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class BlockCheckpoint(Peer):
    """Checkpointing of blocks. With `selective` the results of KEPT_OPERATIONS are kept."""

    def __init__(self, name: str, *, selective: bool) -> None:
        self.name = name
        self._selective = selective

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        contexts = functools.partial(_contexts, selective=self._selective, place=trial.place)
        recomputed = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        with checkpointed(trial.workload.model, trial.blocks, recomputed):
            yield Opened()


def _contexts(*, selective: bool, place: Place) -> Contexts:
    forward, recompute = (
        create_selective_checkpoint_contexts(_keeps)  # type: ignore[no-untyped-call]
        if selective
        else (contextlib.nullcontext(), contextlib.nullcontext())
    )
    if isinstance(place, MachinePlace):
        # Torch disables function modes in the backward pass: without this the recompute has the shapes of the CPU.
        return forward, _Both(CudaShaped(), recompute)
    return forward, recompute


def _keeps(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


class _Both(contextlib.ExitStack):
    """Two context managers as one, entered in their order."""

    def __init__(self, *inner: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._inner = inner

    def __enter__(self) -> _Both:
        for one in self._inner:
            self.enter_context(one)
        return self


@contextlib.contextmanager
def checkpointed(model: nn.Module, kinds: Sequence[str], recomputed: Recomputed) -> Iterator[int]:
    """A context in which `recomputed(forward, *inputs)` runs instead of each block's forward. Yields the number of
    blocks."""
    blocks = outermost(model, kinds)
    replaced: dict[nn.Module, Callable[..., Any]] = {
        block: functools.partial(recomputed, block.forward) for block in blocks
    }
    if not blocks:
        if not isinstance(model, nn.Sequential):
            raise CannotRun(
                f"expected blocks ({', '.join(kinds) or 'no classes are named'}) or a chain of layers to checkpoint, "
                f"found none in {type(model).__name__}"
            )
        replaced[model] = functools.partial(_in_segments, segments_of(model), recomputed)
    for module, forward in replaced.items():
        object.__setattr__(module, "forward", forward)  # the instance's attribute hides the method of its class
    try:
        yield len(blocks) or len(segments_of(model))
    finally:
        for module in replaced:
            object.__delattr__(module, "forward")


def outermost(model: nn.Module, kinds: Sequence[str]) -> list[nn.Module]:
    """The modules of those classes that are not inside another one of them."""
    found: list[nn.Module] = []
    for child in model.children():
        found += [child] if type(child).__name__ in kinds else outermost(child, kinds)
    return found


def segments_of(chain: nn.Module) -> list[nn.Sequential]:
    layers = list(chain.children())
    longest = math.ceil(len(layers) / math.isqrt(len(layers)))
    segments: list[list[nn.Module]] = [[]]
    for layer in layers:
        begins = isinstance(layer, (nn.Conv2d, nn.Linear, nn.Conv3d))
        if begins and len(segments[-1]) >= longest:
            segments.append([])
        segments[-1].append(layer)
    return [nn.Sequential(*segment) for segment in segments]


def _in_segments(segments: Sequence[nn.Sequential], recomputed: Recomputed, x: Any) -> Any:
    for segment in segments:
        x = recomputed(segment, x)
    return x


CHECKPOINT = BlockCheckpoint("checkpoint", selective=False)
CHECKPOINT_SELECTIVE = BlockCheckpoint("checkpoint-selective", selective=True)
