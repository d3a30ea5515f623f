"""A storage that was discarded without a copy and is recomputed from its operands before its use.

While a holder outside the runtime keeps the source alive, a use takes the source: see [Note: A source that others hold
is used]. A recomputed storage is held until its last known use, and serves only the stream that it was recomputed on,
as a reload does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vdnn import _C
from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.storage.geometry import label_text
from vdnn.runtime.storage.kept import kept_tensor

if TYPE_CHECKING:
    from vdnn.runtime.storage.managed_storage import ManagedStorage


class Operand(Protocol):
    """A save that a recipe reads. Its storage may move."""

    @property
    def managed(self) -> ManagedStorage: ...


class Check(Protocol):
    """Compares a recomputed storage with a hash of the discarded one."""

    def compare(self, address: int, nbytes: int, stream: _C.Stream) -> None: ...


class RecomputeRecipe(Protocol):
    """Recomputes one storage. Owns its operands, and holds no part of the graph."""

    @property
    def operands(self) -> Sequence[Operand]: ...

    @property
    def is_exact_in_bytes(self) -> bool:
        """True if the recompute restores every byte, False if it restores only the values of one dtype."""

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor: ...


def _plain_unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, tuple):
        return kept_tensor(packed)
    tensor: torch.Tensor = packed.unpack()
    return tensor


def missing_for(managed: ManagedStorage) -> list[ManagedStorage]:
    """The storages to recompute before `managed` is used, each after its operands; `managed` is the last.

    Not recursive: a chain of recomputes may be as long as the network is deep.
    """
    missing: dict[ManagedStorage, None] = {}
    waiting = [(managed, False)]
    while waiting:
        one, has_operands = waiting.pop()
        if one in missing or one.discarded is None or not one.must_be_recomputed:
            continue
        if has_operands:
            missing[one] = None
            continue
        waiting.append((one, True))
        waiting += [(operand.managed, False) for operand in reversed(one.discarded.operands)]
    return list(missing)


class Discarded:
    """The recipe of one discarded storage, and its recomputed bytes. The managed storage owns it.

    `is_exact`: the recompute is bit for bit, provided that its operands are. `check` compares recomputed bytes with the
    discarded ones.
    """

    __slots__ = ("_check", "_hash", "_recipe", "_recomputed", "_source", "_stream", "_unused_views", "is_exact")

    def __init__(
        self,
        managed: ManagedStorage,
        source: torch.UntypedStorage,
        recipe: RecomputeRecipe,
        is_exact: bool,
        check: Check | None,
    ) -> None:
        transport = managed.transport
        self.is_exact = is_exact
        self._check = check
        self._hash: torch.Tensor | None = None
        if transport.integrity is not None and is_exact:
            self._hash = transport.integrity.hash(managed.address, managed.nbytes, transport.current_stream())
        self._source = StorageWeakRef(source)  # type: ignore[no-untyped-call]
        self._recipe = recipe
        self._recomputed: torch.UntypedStorage | None = None
        self._stream: _C.Stream | None = None
        self._unused_views = 0
        for operand in recipe.operands:
            operand.managed.views += 1  # the recompute is one more use of the operand

    @property
    def operands(self) -> Sequence[Operand]:
        return self._recipe.operands

    @property
    def is_exact_in_bytes(self) -> bool:
        """True if the recomputed bytes are right for a view of any dtype."""
        return self.is_exact and self._recipe.is_exact_in_bytes

    def is_ready(self, managed: ManagedStorage) -> bool:
        """True if the bytes are on the device and the current stream may read them."""
        if self._recomputed is not None:
            return self._stream == managed.transport.current_stream()
        return self._held_by_others(managed) is not None

    def _held_by_others(self, managed: ManagedStorage) -> torch.UntypedStorage | None:
        source: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._source.cdata)
        return None if source is None or source.nbytes() < managed.nbytes else source

    @property
    def is_recomputed(self) -> bool:
        return self._recomputed is not None

    def forget(self) -> None:
        """Releases the bytes that were recomputed for a trial."""
        self._recomputed = None

    def uncount_use(self) -> None:
        """Takes the use by a trial out of the count of uses."""
        self._unused_views += 1

    def keep_source(self, managed: ManagedStorage) -> bool:
        """Holds the source from now on, if another holder still keeps it alive. True if the bytes are held.

        Called before an operand is overwritten, after which no recompute is possible.
        """
        source = self._held_by_others(managed)
        if self._recomputed is None and source is not None:
            self._recomputed, self._stream = source, managed.transport.current_stream()
            self._unused_views = managed.views
        return self._recomputed is not None

    def recompute(self, managed: ManagedStorage, unpack: Callable[[Any], torch.Tensor]) -> None:
        """Recomputes the storage on the current stream. `unpack` unpacks the operands."""
        transport = managed.transport
        if managed.observer is not None:
            managed.observer.about_to_reload(managed)
        self._recomputed = None
        try:
            storage = self._recipe.recompute(unpack).untyped_storage()
        except OperandModifiedError as error:
            raise error.of(label_text(managed.geometry, managed.saved_in)) from None
        except VdnnError as error:
            raise VdnnError(f"{label_text(managed.geometry, managed.saved_in)}: {error}") from error
        if storage.nbytes() != managed.nbytes:
            label = label_text(managed.geometry, managed.saved_in)
            raise RuntimeError(f"expected a recompute of {managed.nbytes} bytes, got {storage.nbytes()}: {label}")
        stream = transport.current_stream()
        # A lossy codec may have replaced an operand since the discard.
        operands = [operand.managed.discarded for operand in self._recipe.operands]
        self.is_exact = self.is_exact and all(one is None or one.is_exact for one in operands)
        if self._hash is not None and transport.integrity is not None and self.is_exact:
            label = label_text(managed.geometry, managed.saved_in)
            transport.integrity.compare(label, self._hash, transport.address_of(storage), managed.nbytes, stream)
        if self._check is not None and self.is_exact:
            self._check.compare(transport.address_of(storage), managed.nbytes, stream)
        if transport.is_checked:
            address = transport.address_of(storage)
            transport.device.note_access(address, managed.nbytes, _C.Access.WRITE, stream, "recompute")
        self._recomputed, self._stream = storage, stream
        self._unused_views = managed.views
        managed.counters.recomputes += 1

    def use(self, managed: ManagedStorage) -> torch.UntypedStorage:
        """The storage on the device. If no hook has recomputed it, this does, and nothing measures that recompute."""
        if not self.is_ready(managed):
            self.recompute(managed, _plain_unpack)
        recomputed = self._recomputed
        if recomputed is None:
            source = self._held_by_others(managed)
            if source is None:
                raise RuntimeError("the source of a discarded storage was released while a hook used it")
            managed.counters.used_in_place += 1
            return source
        managed.counters.used_recomputed += 1
        self._unused_views -= 1
        if self._unused_views <= 0 and not managed.keeps_reloaded:
            # The last known use: the caller's view keeps the bytes alive as long as it needs them.
            self._recomputed = None
            if managed.observer is not None:
                managed.observer.released_reload(managed)
        return recomputed

    def __del__(self) -> None:
        try:
            operands = self._recipe.operands
        except AttributeError:  # __init__ raised
            return
        for operand in operands:
            operand.managed.views -= 1
