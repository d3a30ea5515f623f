"""Finds the blocks that a model repeats, and checkpoints them in a rehearsal."""

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
    """The outermost modules that have submodules and whose class occurs at least twice. A container is not a block, but
    the modules in it may be."""
    inner = [one for one in model.modules() if one is not model and _may_be_block(one)]
    times = Counter(type(one) for one in inner)
    return list(_outermost(model, {kind for kind, count in times.items() if count > 1}))


def checkpoint_blocks(model: nn.Module) -> int:
    """Make the backward pass recompute each block from now on. Returns the number of blocks."""
    blocks = repeated_blocks(model)
    for block in blocks:
        recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_contexts)
        object.__setattr__(block, "forward", recomputed)  # the instance's attribute hides the method of its class
    return len(blocks)


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts for the forward pass and the recompute. Torch disables function modes in the backward pass, so without
    CudaShaped the recompute would have the shapes of the CPU."""
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
