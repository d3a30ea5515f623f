"""A rebuild outside of any plan: what it costs, and whether its outcome is what was there."""

from __future__ import annotations

from typing import Any

import torch

from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute import Recipe
from vdnn.runtime.recompute.codecs import Codec
from vdnn.runtime.recompute.recompute_cost import Proof
from vdnn.runtime.storage.discarded import Dropped, missing_for
from vdnn.runtime.storage.managed_storage import ManagedStorage, Residency
from vdnn.runtime.storage.packed_view import PackedView


class Trial:
    """Of one recipe, for one storage."""

    def __init__(self, managed: ManagedStorage, recipe: Recipe | Codec, gauges: Gauges | None) -> None:
        self._managed = managed
        self._recipe = recipe
        self._gauges = gauges
        self._stand_ins: list[torch.Tensor] = []
        # Back on the device for the trial alone; and what was there, whose uses the trial must not count for.
        self._borrowed: list[ManagedStorage] = []
        self._rebuilt: list[Dropped] = []
        self._read: list[Dropped] = []
        self.proof = Proof(0, 0)

    def run(self) -> torch.Tensor:
        try:
            return self._run()
        finally:
            for managed in self._borrowed:
                managed.release()
            for dropped in self._rebuilt:
                dropped.forget()
            for dropped in self._read:
                dropped.uncount_use()
            self._borrowed.clear()
            self._rebuilt.clear()
            self._read.clear()

    def _run(self) -> torch.Tensor:
        gauges, transport = self._gauges, self._managed.transport
        if gauges is None:
            return self._recipe.rebuild(self._operand)
        self._begin()
        made = self._recipe.rebuild(self._operand)
        end = gauges.mark(transport.current_stream())
        extra_bytes = gauges.take_peaks()[0] - self._before_bytes
        self.proof = Proof(gauges.ns_between(self._begin_mark, end), max(extra_bytes, self._managed.nbytes))
        self._stand_ins.clear()
        return made

    def _begin(self) -> None:
        gauges = self._gauges
        if gauges is not None:
            gauges.take_peaks()
            self._before_bytes = gauges.allocated_bytes()
            self._begin_mark = gauges.mark(self._managed.transport.current_stream())

    def _operand(self, packed: Any) -> torch.Tensor:
        """All are asked for before anything is computed: what that costs is no part of it."""
        view: PackedView = packed
        if view.managed.transport.fake:
            dtype, size, stride = view.geometry
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            self._stand_ins.append(tensor)  # in a step the operand stays, whoever has read it
        else:
            if view.managed.residency is Residency.HOST:
                self._borrowed.append(view.managed)
            if view.managed.dropped is not None:
                missing = [one.dropped for one in missing_for(view.managed) if one.dropped is not None]
                self._rebuilt += missing
                if not missing:
                    self._read.append(view.managed.dropped)
            tensor = view.unpack()
        self._begin()
        return tensor


def bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """As a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, begin, (nbytes,), (1,))


def is_as_it_was(recipe: Recipe | Codec, original: torch.Tensor, made: torch.Tensor) -> bool:
    """Byte for byte; what a lossy codec made, within its bound. `original` is flat."""
    storage = made.untyped_storage()
    if original.nbytes != storage.nbytes():
        return False
    with torch.no_grad():
        flat = bytes_of(storage, 0, storage.nbytes())
        if recipe.is_exact or not isinstance(recipe, Codec):
            return torch.equal(original, flat)
        return bool(recipe.is_close(original.view(made.dtype), flat.view(made.dtype)))
