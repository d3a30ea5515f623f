"""Tensors and modules that vdnn.keep marked: every session of the process keeps them on the device."""

from __future__ import annotations

import torch

from vdnn.runtime.torch_internals.module_watch import MarkedModules
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import storage_of

marked_storages = StorageSet()
marked_modules = MarkedModules()


def mark_to_keep(what: torch.Tensor | torch.nn.Module) -> None:
    """Every session keeps `what` on the device from now on."""
    if isinstance(what, torch.Tensor):
        storage = storage_of(what)
        if storage is not None:  # a tensor without a storage is never managed
            marked_storages.add(storage)
    else:
        marked_modules.add(what)
