"""A storage that was given up without a copy, and is rebuilt from others when it is used.

As long as somebody else holds the source, that is used; see [Note: A source that others hold is used]. What was rebuilt
stays until its last known use, and serves the stream it was made for, as a reload does.
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
    """What a recipe reads, and whose storage may move."""

    @property
    def managed(self) -> ManagedStorage: ...


class Check(Protocol):
    """Compares a rebuilt storage with a hash of what was given up."""

    def compare(self, address: int, nbytes: int, stream: _C.Stream) -> None: ...


class RebuildRecipe(Protocol):
    """How it is made again: owns its operands, and no part of the graph."""

    @property
    def operands(self) -> Sequence[Operand]: ...

    @property
    def is_exact_in_bytes(self) -> bool:
        """Whether bytes come back, and not only the values of one dtype."""

    def rebuild(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor: ...


def _plain_unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, tuple):
        return kept_tensor(packed)
    tensor: torch.Tensor = packed.unpack()
    return tensor


def missing_for(managed: ManagedStorage) -> list[ManagedStorage]:
    """What has to be rebuilt before it can be used: it too, behind all that it reads. No recursion: a chain of such may
    be as long as the network is deep."""
    missing: dict[ManagedStorage, None] = {}
    waiting = [(managed, False)]
    while waiting:
        one, is_ready = waiting.pop()
        if one in missing or one.dropped is None or not one.must_be_rebuilt:
            continue
        if is_ready:
            missing[one] = None
            continue
        waiting.append((one, True))
        waiting += [(operand.managed, False) for operand in reversed(one.dropped.operands)]
    return list(missing)


class Dropped:
    """Of one managed storage, which owns it. `is_exact`: it comes back bit for bit, if what it is made of does.
    `check` compares what is rebuilt with what was there."""

    __slots__ = ("_check", "_hash", "_rebuilt", "_recipe", "_source", "_stream", "_unused_views", "is_exact")

    def __init__(
        self,
        managed: ManagedStorage,
        source: torch.UntypedStorage,
        recipe: RebuildRecipe,
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
        self._rebuilt: torch.UntypedStorage | None = None
        self._stream: _C.Stream | None = None
        self._unused_views = 0
        for operand in recipe.operands:
            operand.managed.views += 1  # read once more than it was saved

    @property
    def operands(self) -> Sequence[Operand]:
        return self._recipe.operands

    @property
    def is_exact_in_bytes(self) -> bool:
        """Whatever dtype they are read as."""
        return self.is_exact and self._recipe.is_exact_in_bytes

    def is_here(self, managed: ManagedStorage) -> bool:
        """On the device, for the current stream."""
        if self._rebuilt is not None:
            return self._stream == managed.transport.current_stream()
        return self._held_by_others(managed) is not None

    def _held_by_others(self, managed: ManagedStorage) -> torch.UntypedStorage | None:
        source: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._source.cdata)
        return None if source is None or source.nbytes() < managed.nbytes else source

    @property
    def is_rebuilt(self) -> bool:
        return self._rebuilt is not None

    def forget(self) -> None:
        """What was rebuilt for a trial."""
        self._rebuilt = None

    def uncount_use(self) -> None:
        """One that was a trial's."""
        self._unused_views += 1

    def keep_source(self, managed: ManagedStorage) -> bool:
        """From now on holds the source itself, if somebody else still does: what it would be rebuilt from later is
        about to be overwritten."""
        source = self._held_by_others(managed)
        if self._rebuilt is None and source is not None:
            self._rebuilt, self._stream = source, managed.transport.current_stream()
            self._unused_views = managed.views
        return self._rebuilt is not None

    def rebuild(self, managed: ManagedStorage, unpack: Callable[[Any], torch.Tensor]) -> None:
        """`unpack` makes the operands. On the current stream."""
        transport = managed.transport
        if managed.observer is not None:
            managed.observer.about_to_reload(managed)
        self._rebuilt = None
        try:
            storage = self._recipe.rebuild(unpack).untyped_storage()
        except OperandModifiedError as error:
            raise error.of(label_text(managed.geometry, managed.saved_in)) from None
        except VdnnError as error:
            raise VdnnError(f"{label_text(managed.geometry, managed.saved_in)}: {error}") from error
        if storage.nbytes() != managed.nbytes:
            raise RuntimeError(f"a rebuild made {storage.nbytes()} bytes instead of {managed.nbytes}")
        stream = transport.current_stream()
        # What a lossy codec made an operand of is known only now.
        made_of = [operand.managed.dropped for operand in self._recipe.operands]
        self.is_exact = self.is_exact and all(one is None or one.is_exact for one in made_of)
        if self._hash is not None and transport.integrity is not None and self.is_exact:
            label = label_text(managed.geometry, managed.saved_in)
            transport.integrity.compare(label, self._hash, transport.address_of(storage), managed.nbytes, stream)
        if self._check is not None and self.is_exact:
            self._check.compare(transport.address_of(storage), managed.nbytes, stream)
        if transport.is_checked:
            address = transport.address_of(storage)
            transport.device.note_access(address, managed.nbytes, _C.Access.WRITE, stream, "rebuild")
        self._rebuilt, self._stream = storage, stream
        self._unused_views = managed.views
        managed.counters.rebuilds += 1

    def use(self, managed: ManagedStorage) -> torch.UntypedStorage:
        """As a rule it is here: else it is rebuilt, unobserved."""
        if not self.is_here(managed):
            self.rebuild(managed, _plain_unpack)
        rebuilt = self._rebuilt
        if rebuilt is None:
            source = self._held_by_others(managed)
            assert source is not None, "nobody else runs between"
            managed.counters.used_in_place += 1
            return source
        self._unused_views -= 1
        if self._unused_views <= 0 and not managed.keeps_reloaded:
            # The last known use: the caller's view keeps the bytes for as long as it needs them.
            self._rebuilt = None
            if managed.observer is not None:
                managed.observer.gave_up_reload(managed)
        return rebuilt

    def __del__(self) -> None:
        try:
            operands = self._recipe.operands
        except AttributeError:  # an exception ended its making
            return
        for operand in operands:
            operand.managed.views -= 1
