"""A rebuild outside of any plan: what it costs, and whether its outcome is what was there."""

from __future__ import annotations

from typing import Any

import torch

from vdnn.runtime.codecs import Codec
from vdnn.runtime.gauges import Gauges
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.proof import Proof
from vdnn.runtime.recompute import Recipe
from vdnn.runtime.residency import ManagedStorage


class Trial:
    """Of one recipe, for one storage."""

    def __init__(self, managed: ManagedStorage, recipe: Recipe | Codec, gauges: Gauges | None) -> None:
        self._managed = managed
        self._recipe = recipe
        self._gauges = gauges
        self._stand_ins: list[torch.Tensor] = []
        self.proof = Proof(0, 0)

    def run(self) -> torch.Tensor:
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
            tensor = view.unpack()
        self._begin()
        return tensor


def is_as_it_was(recipe: Recipe | Codec, source: torch.UntypedStorage, made: torch.Tensor) -> bool:
    """Byte for byte; what a lossy codec made, within its bound."""
    storage = made.untyped_storage()
    if source.nbytes() != storage.nbytes():
        return False
    dtype = torch.uint8 if recipe.is_exact else made.dtype
    with torch.no_grad():
        first, second = (torch.empty(0, dtype=dtype, device=made.device).set_(one) for one in (source, storage))
        return bool(recipe.is_close(first, second)) if isinstance(recipe, Codec) else torch.equal(first, second)
