"""Recomputes discarded storages: before their use, and before one of their operands may be overwritten.

[Note: Who overwrites] A custom backward may overwrite the tensors that it unpacks, and an optimizer that steps within a
backward writes to parameters. Every discarded storage that reads such a tensor is recomputed first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vdnn._C import KeptSave
from vdnn.errors import VdnnError
from vdnn.runtime.recompute.readers import Readers, may_be_overwritten
from vdnn.runtime.steps.unwatched import Steps
from vdnn.runtime.storage.discarded import Recomputable, missing_for
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.managed_storage import ManagedStorage


class Missing:
    """The discarded storages of one session. Callers hold the packer's lock; `unpack` is the session's unpack hook."""

    def __init__(self, unpack: Callable[[Any], torch.Tensor], steps: Steps, readers: Readers) -> None:
        self._unpack = unpack
        self._steps = steps
        self._readers = readers
        self.discarded = readers.discarded  # usually empty
        self._is_recomputing = False

    def cut(self) -> None:
        """Nothing is discarded, and nothing will be. See abandoned.py."""
        self._unpack = unpack_without_hooks

    def recompute_for(self, managed: ManagedStorage) -> None:
        """Recomputes `managed` and, before it, every discarded storage that its recipe reads."""
        for missing in missing_for(managed):
            self._recompute(missing)

    def _recompute(self, managed: Recomputable) -> None:
        """Follows the recipe of `managed`. Its operands are used through the unpack hook, before the current use."""
        was_recomputing = self._is_recomputing
        self._is_recomputing = True
        try:
            with self._steps.recomputing(managed.transport):
                managed.recompute(self._unpack)
        finally:
            self._is_recomputing = was_recomputing

    # See [Note: Who overwrites].

    def before_use(self, source: ManagedStorage | KeptSave | torch.Tensor) -> None:
        """Called before the unpack hook returns `source`."""
        if not self._is_recomputing and may_be_overwritten():
            self._recompute_early(self._readers.of(source))

    def before_writes_to(self, tensors: Iterable[torch.Tensor]) -> None:
        if self.discarded:
            self._recompute_early(self._readers.of_all(tensors))

    def _recompute_early(self, readers: list[ManagedStorage]) -> None:
        """Errors are suppressed here: the use of a storage that cannot be recomputed raises them again."""
        for reader in readers:
            if reader.discarded is None or reader.discarded.keep_source(reader.views):
                continue
            with contextlib.suppress(VdnnError, RuntimeError):  # RuntimeError: an operand was modified
                self.recompute_for(reader)
