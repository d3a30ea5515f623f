"""Runs a recipe once beside the original, measures its recompute cost, and compares the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute import Recipe
from vdnn.runtime.recompute.codecs import Codec
from vdnn.runtime.recompute.held_results import HeldResults
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.storage.discarded import Discarded, Recomputable, missing_for
from vdnn.runtime.storage.kept import unpack_kept
from vdnn.runtime.storage.managed_storage import ManagedStorage, Residency
from vdnn.runtime.storage.packed_view import PackedView

_WORD = 8  # bytes


class Trial:
    """Runs a recipe for a storage. After each run its operands are where they were before. Without gauges the cost is
    not measured. Operands whose results are `held` are not recomputed."""

    def __init__(
        self, managed: ManagedStorage, recipe: Recipe | Codec, gauges: Gauges | None, held: HeldResults | None = None
    ) -> None:
        self._held = held
        self._managed = managed
        self._recipe = recipe
        self._gauges = gauges
        self._stand_ins: list[torch.Tensor] = []
        # Reloaded or recomputed for the trial alone; and recomputed before it: the trial does not count as their use.
        self._borrowed: list[ManagedStorage] = []
        self._recomputed: list[Recomputable] = []
        self._read: list[Discarded] = []
        self._operands_left = 0  # to unpack
        self.cost = RecomputeCost(0, 0)

    def run(self) -> torch.Tensor:
        try:
            return self._run()
        finally:
            for managed in self._borrowed:
                managed.release()
            for recomputed in self._recomputed:
                recomputed.forget_recomputed()
            for discarded in self._read:
                discarded.uncount_use()
            self._borrowed.clear()
            self._recomputed.clear()
            self._read.clear()

    def _run(self) -> torch.Tensor:
        gauges, transport = self._gauges, self._managed.transport
        if gauges is None:
            return self._recipe.recompute(self._operand)
        self._operands_left = self._recipe.num_unpacked
        if not self._operands_left:
            self._begin()
        made = self._recipe.recompute(self._operand)
        end, issue_ns = gauges.mark(transport.current_stream()), gauges.issued_ns() - self._begin_issued_ns
        extra_bytes = gauges.take_peaks().peak_bytes - self._before_bytes
        with gauges.host_waits():
            took_ns = gauges.ns_between(self._begin_mark, end)
        self.cost = RecomputeCost(took_ns, max(extra_bytes, self._managed.nbytes), issue_ns=issue_ns)
        self._stand_ins.clear()
        return made

    def _begin(self) -> None:
        gauges = self._gauges
        if gauges is not None:
            self._before_bytes = gauges.take_peaks().allocated_bytes
            stream = self._managed.transport.current_stream()
            gauges.fall_behind(stream)
            self._begin_mark, self._begin_issued_ns = gauges.mark(stream), gauges.issued_ns()

    def _operand(self, packed: Any) -> torch.Tensor:
        """Unpack an operand. The recipe unpacks all of them before it computes, and that is not part of the cost."""
        if isinstance(packed, KeptSave):
            tensor = unpack_kept((packed.tensor, packed.version))
            self._operand_is_there()
            return tensor
        view: PackedView = packed.full() if isinstance(packed, LightSave) else packed
        if view.managed.transport.fake:
            dtype, size, stride = view.geometry
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            self._stand_ins.append(tensor)  # in a step the operand stays allocated after it is read
        else:
            if view.managed.residency is Residency.HOST:
                self._borrowed.append(view.managed)
            if view.managed.discarded is not None:
                missing = self._missing_for(view.managed)
                self._recomputed += missing
                if not missing:
                    self._read.append(view.managed.discarded)
            tensor = view.unpack()
        self._operand_is_there()
        return tensor

    def _missing_for(self, managed: ManagedStorage) -> list[Recomputable]:
        """The storages to recompute before this operand is read, after those were lent whose results are held."""
        if self._lends(managed):
            return []
        found = _storages(missing_for(managed))
        lent = [one for one in found if self._lends(one)]
        return _storages(missing_for(managed)) if lent else found

    def _lends(self, managed: Recomputable) -> bool:
        if self._held is None or not isinstance(managed, ManagedStorage) or not self._held.lend(managed):
            return False
        self._recomputed.append(managed)
        return True

    def _operand_is_there(self) -> None:
        self._operands_left -= 1
        if not self._operands_left:
            self._begin()


def _storages(found: Sequence[Recomputable | LightSave]) -> list[Recomputable]:
    return [one.full().managed if isinstance(one, LightSave) else one for one in found]


def trial_bytes(managed: ManagedStorage, recipe: Recipe | Codec, cost: RecomputeCost | None) -> int:
    """The bytes that a trial takes: as many as the recompute took before, or the results of all operations; operands
    that are not on the device; and on a GPU a flag for each word that is compared."""
    results = recipe.result_bytes if cost is None else cost.extra_bytes
    away = [one.managed for one in recipe.operands if one.managed.source.storage is None]
    elements = managed.nbytes if managed.nbytes % _WORD else managed.nbytes // _WORD
    compared = elements if managed.transport.torch_device.type == "cuda" else 0
    return max(results, managed.nbytes) + compared + sum(one.nbytes for one in away)


def bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """A flat tensor of these bytes of a storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, begin, (nbytes,), (1,))


def _as_words(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same bytes on a GPU as words, where they are whole words: it makes a flag for each element that it
    compares."""
    are_words = all(
        one.is_cuda and one.nbytes % _WORD == one.storage_offset() % _WORD == one.data_ptr() % _WORD == 0
        for one in flat
    )
    return tuple(one.view(torch.int64) for one in flat) if are_words else flat


def gives_original(recipe: Recipe | Codec, original: torch.Tensor, made: torch.Tensor) -> bool:
    """True if `made` equals the original byte for byte, or is within the bound of a lossy codec. `original` is flat."""
    storage = made.untyped_storage()
    if original.nbytes != storage.nbytes():
        return False
    with torch.no_grad():
        flat = bytes_of(storage, 0, storage.nbytes())
        if recipe.is_exact or not isinstance(recipe, Codec):
            return torch.equal(*_as_words(original, flat))
        return bool(recipe.is_close(original.view(made.dtype), flat.view(made.dtype)))
