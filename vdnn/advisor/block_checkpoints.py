"""Checkpointing of the blocks that a model repeats: which they are, and rehearsing with it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint

from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with parts of their own whose class occurs twice or more. Containers are no blocks: what is
    in them is."""
    inner = [one for one in model.modules() if one is not model and _may_be_block(one)]
    times = Counter(type(one) for one in inner)
    return list(_outermost(model, {kind for kind, count in times.items() if count > 1}))


def checkpoint_blocks(model: nn.Module) -> int:
    """From now on each block is recomputed in the backward pass. How many there are."""
    blocks = repeated_blocks(model)
    for block in blocks:
        recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_contexts)
        object.__setattr__(block, "forward", recomputed)  # an instance's own attribute goes before its class's method
    return len(blocks)


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """In the backward pass torch has put function modes aside: what is recomputed would be shaped as on the CPU."""
    return nullcontext(), CudaShaped()


def _may_be_block(module: nn.Module) -> bool:
    has_parts = next(module.children(), None) is not None
    return has_parts and type(module) not in _CONTAINERS and next(module.parameters(), None) is not None


def _outermost(module: nn.Module, kinds: set[type[nn.Module]]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in kinds:
            yield child
        else:
            yield from _outermost(child, kinds)
