"""Refuses trained parameters that leave under DDP or FSDP2.

[Note: Who holds a gradient's node] DDP puts its hooks on the node of each parameter's gradient once, when it wraps the
model. Torch makes another node when the data of the parameter move between devices, so DDP would never hear of a
gradient again. FSDP2 gathers its shards from memory of its own, which does not know of a parameter's data on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from vdnn.errors import CombinationError
from vdnn.runtime.torch_internals.local_shards import is_sharded

_WAY_OUT = "Use parameters='frozen', and gradients=True for the gradients"


def refuse_data_parallel(model: torch.nn.Module) -> None:
    """Raises CombinationError if DDP or FSDP2 has a part of `model`."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise _under_ddp()
    if any(map(is_sharded, model.parameters())):
        raise CombinationError(
            ours="parameters='all'",
            theirs="FSDP2 or another DTensor",
            reason="it gathers its shards from memory of its own, so they cannot be elsewhere",
            way_out=_WAY_OUT,
        )


def watch_data_parallel(parameters: Iterable[torch.Tensor]) -> Callable[[], object]:
    """Raises CombinationError before a module under DDP runs that has one of `parameters`. Returns what ends this."""
    ids = frozenset(map(id, parameters))

    def before(module: torch.nn.Module, args: object) -> None:
        if isinstance(module, DistributedDataParallel) and any(id(one) in ids for one in module.parameters()):
            raise _under_ddp()

    handle: Any = torch.nn.modules.module.register_module_forward_pre_hook(before)
    return handle.remove  # type: ignore[no-any-return]


def _under_ddp() -> CombinationError:
    return CombinationError(
        ours="parameters='all'",
        theirs="DistributedDataParallel",
        reason="torch replaces the nodes that have DDP's hooks when a parameter's data leave the device",
        way_out=_WAY_OUT,
    )
