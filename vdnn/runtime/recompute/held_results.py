"""The results of the last trials without a plan, which later trials read instead of recomputing them.

[Note: Held results] A policy that discards without a plan tries each recipe at each save, and most recipes read what
was discarded a few saves before. To recompute that for each trial, with all that it needs in turn, made nine of ten
recomputes of a GPT-2 step. So the results of the last few exact trials are held. A recompute would give the same, and
no program can reach their memory. A trial borrows one for as long as it runs. The first use of a save releases all of
them, and so does the end of a step, so a backward pass reads recomputed values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from vdnn import _C
from vdnn.runtime.storage.managed_storage import ManagedStorage

_MOST = 4  # storages: attention lies between a layer's input and what reads it next


class HeldResults:
    """See [Note: Held results]."""

    def __init__(self) -> None:
        self._held: dict[weakref.ref[ManagedStorage], tuple[torch.UntypedStorage, _C.Stream]] = {}
        self._ended = _without(self._held)

    def hold(self, managed: ManagedStorage, made: torch.UntypedStorage) -> None:
        """Holds what an exact trial for `managed` made on the current stream, in place of the oldest result."""
        held = self._held
        held[weakref.ref(managed, self._ended)] = made, managed.transport.current_stream()
        for oldest in list(held)[:-_MOST]:
            held.pop(oldest, None)

    def lend(self, managed: ManagedStorage) -> bool:
        """Makes the held bytes those of a discarded storage, until `forget_recomputed`. False if none are held that
        the current stream may read."""
        held = self._held.get(weakref.ref(managed)) if self._held else None
        discarded = managed.discarded
        if held is None or discarded is None or not managed.must_be_recomputed:
            return False
        storage, stream = held
        if stream != managed.transport.current_stream():
            return False
        discarded.resume(storage, managed.views)
        return True

    def release(self) -> None:
        """Releases all of them."""
        self._held.clear()


def _without(held: dict[weakref.ref[ManagedStorage], tuple[torch.UntypedStorage, _C.Stream]]) -> Callable[..., None]:
    def ended(reference: weakref.ref[ManagedStorage]) -> None:
        held.pop(reference, None)

    return ended
