"""Recomputes discarded storages: before their use, and before one of their operands may be overwritten.

[Note: Who overwrites] A custom backward may overwrite the tensors that it unpacks, and an optimizer that steps within a
backward writes to parameters. Every discarded storage that reads such a tensor is recomputed first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.errors import VdnnError
from vdnn.runtime.recompute.readers import Readers, may_be_overwritten
from vdnn.runtime.recompute.surroundings import chain_of_runs
from vdnn.runtime.steps.steps import Steps
from vdnn.runtime.storage.discarded import Recomputable, missing_for, still_missing
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.managed_storage import ManagedStorage

_ALONE = contextlib.nullcontext()


def recomputed(save: LightSave, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """All bytes of the storage of a save that the native gate discarded, in the geometry that the gate expects."""
    made: torch.Tensor = save.recipe.recipe.recompute(unpack)
    size, strides = save.whole_geometry
    if made.shape == size and made.stride() == strides:
        return made
    with torch.no_grad():
        return made.as_strided(size, strides, 0)


class Missing:
    """The discarded storages of one session. Callers hold the lock of its saves; `unpack` is the unpack hook."""

    def __init__(self, unpack: Callable[[Any], torch.Tensor], steps: Steps, readers: Readers) -> None:
        self._unpack = unpack
        self._steps = steps
        self._readers = readers
        self._is_recomputing = False

    def cut(self) -> None:
        """Nothing is discarded, and nothing will be. See abandoned.py."""
        self._unpack = unpack_without_hooks

    def recompute_for(self, wanted: ManagedStorage | LightSave) -> None:
        """Recomputes `wanted` and, before it, every discarded storage that its recipe reads."""
        missing = missing_for(wanted)
        with chain_of_runs() if len(missing) > 1 else _ALONE:
            for one in map(still_missing, missing):
                if one is not None:
                    self._recompute(one)

    def _recompute(self, missing: Recomputable | LightSave) -> None:
        """Follows a recipe. Its operands are used through the unpack hook, before the current use."""
        was_recomputing = self._is_recomputing
        self._is_recomputing = True
        try:
            if isinstance(missing, LightSave):
                missing.restore(recomputed(missing, self._unpack))
                return
            with self._steps.recomputing(missing.transport):
                missing.recompute(self._unpack)
        finally:
            self._is_recomputing = was_recomputing

    # See [Note: Who overwrites].

    def before_use(self, source: ManagedStorage | KeptSave | torch.Tensor) -> None:
        """Called before the unpack hook returns `source`."""
        if not self._is_recomputing and may_be_overwritten():
            self._recompute_early(self._readers.of(source))

    def before_writes_to(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._readers.are_there:
            self._recompute_early(self._readers.of_all(tensors))

    def _recompute_early(self, readers: list[ManagedStorage]) -> None:
        """Errors are suppressed here: the use of a storage that cannot be recomputed raises them again."""
        for reader in readers:
            if reader.discarded is None or reader.discarded.keep_source(reader.views):
                continue
            with contextlib.suppress(VdnnError, RuntimeError):  # RuntimeError: an operand was modified
                self.recompute_for(reader)
