"""Recomputes discarded storages: before they are used, and before what they are made of may be overwritten.

[Note: Who overwrites] A custom backward may overwrite what it unpacks, and an optimizer that steps within a backward
writes to parameters. What is yet to be recomputed from those is recomputed before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.recompute.readers import Readers, may_be_overwritten
from vdnn.runtime.steps.watch import StepWatch
from vdnn.runtime.storage.discarded import missing_for
from vdnn.runtime.storage.managed_storage import ManagedStorage


class Missing:
    """One session's discarded storages. Called by hooks, which hold the packer's lock; `unpack` is the hook."""

    def __init__(self, unpack: Callable[[Any], torch.Tensor], steps: StepWatch | None, readers: Readers) -> None:
        self._unpack = unpack
        self._steps = steps
        self._readers = readers
        self.read = readers.by_source  # as a rule there is nothing in it
        self._is_recomputing = False

    def recompute_for(self, managed: ManagedStorage) -> None:
        """What has to be recomputed before `managed` can be used: it too."""
        for missing in missing_for(managed):
            self._recompute(missing)

    def _recompute(self, managed: ManagedStorage) -> None:
        """What it reads is used like anything else: at hooks of their own, before this use's."""
        dropped, steps, was_recomputing = managed.dropped, self._steps, self._is_recomputing
        if dropped is None:
            raise RuntimeError("a storage is to be recomputed that was not discarded")
        self._is_recomputing = True
        try:
            with contextlib.nullcontext() if steps is None else steps.rebuilding(managed.transport):
                dropped.rebuild(managed, self._unpack)
        finally:
            self._is_recomputing = was_recomputing

    # See [Note: Who overwrites].

    def before_use(self, source: ManagedStorage | torch.Tensor) -> None:
        """`source` is about to be handed out."""
        if self._is_recomputing:
            return
        readers = self._readers.of(source)
        if readers and may_be_overwritten():
            self._recompute_early(readers)

    def before_writes_to(self, tensors: Iterable[torch.Tensor]) -> None:
        if self.read:
            self._recompute_early(self._readers.of_all(tensors))

    def _recompute_early(self, readers: list[ManagedStorage]) -> None:
        """What cannot be recomputed says so at its use."""
        for reader in readers:
            if reader.dropped is None or reader.dropped.keep_source(reader):
                continue
            with contextlib.suppress(VdnnError, RuntimeError):  # the latter: an operand was modified
                self.recompute_for(reader)
