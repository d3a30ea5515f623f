"""The part of a managed storage that was discarded without a copy, and is recomputed before its use.

While a holder outside the runtime keeps the source alive, a use takes the source: see [Note: A source that others hold
is used]. A recomputed storage is held until its last known use, and serves only the stream that it was recomputed on,
as a reload does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from vdnn import _C
from vdnn._C import CountedRecipe
from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.storage.facts import StorageFacts
from vdnn.runtime.storage.source import Source
from vdnn.runtime.storage.transport import Transport


class RecomputeCheck(Protocol):
    """Compares a recomputed storage with a hash of the discarded one."""

    def compare(self, address: int, nbytes: int, stream: _C.Stream) -> None: ...


class Recomputable(Protocol):
    """A managed storage, as far as recipes know it."""

    views: int

    @property
    def discarded(self) -> Discarded | None: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def must_be_recomputed(self) -> bool: ...

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> None: ...

    def forget_recomputed(self) -> None: ...


class Operand(Protocol):
    """A save that a recipe reads. Its storage may move."""

    @property
    def managed(self) -> Recomputable: ...


class RecomputeRecipe(Protocol):
    """Recomputes one storage. Owns its operands, and holds no part of the graph. A CountedRecipe counts its recompute
    as one more use of each operand."""

    @property
    def given(self) -> Sequence[Any]:
        """Everything that it reads."""

    @property
    def operands(self) -> Sequence[Operand]: ...

    @property
    def light_operands(self) -> Sequence[_C.LightSave]:
        """Further operands, which the native gate moves."""

    @property
    def sources(self) -> Sequence[Recomputable | _C.LightSave]:
        """The storages of all operands, in the order in which they are unpacked."""

    @property
    def nodes(self) -> Sequence[int]:
        """The sequence numbers of the nodes whose operations may run again."""

    @property
    def is_exact_in_bytes(self) -> bool:
        """True if the recompute restores every byte, False if it restores only the values of one dtype."""

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor: ...


def missing_for(wanted: Recomputable | _C.LightSave) -> list[Recomputable | _C.LightSave]:
    """The storages to recompute before `wanted` is used, each after its operands; `wanted` is the last. A storage that
    the native gate discarded is one of its saves.

    Not recursive: a chain of recomputes may be as long as the network is deep.
    """
    missing: dict[int, Recomputable | _C.LightSave] = {}
    waiting = [(_current(wanted), False)]
    while waiting:
        one, has_operands = waiting.pop()
        identity = one.identity if isinstance(one, _C.LightSave) else id(one)
        counted = None if identity in missing else _recipe_to_follow(one)
        if counted is None:
            continue
        if has_operands:
            missing[identity] = one
            continue
        waiting.append((one, True))
        waiting += [(_current(source), False) for source in reversed(counted.recipe.sources)]
    return list(missing.values())


def still_missing(one: Recomputable | _C.LightSave) -> Recomputable | _C.LightSave | None:
    """`one` as it is by now, or None if it was recomputed. The recompute of an operand may end the settled step, and
    what the gate discarded is a managed storage then."""
    current = _current(one)
    return None if _recipe_to_follow(current) is None else current


def _current(one: Recomputable | _C.LightSave) -> Recomputable | _C.LightSave:
    view = one.view if isinstance(one, _C.LightSave) else None
    return one if view is None else view.managed


def _recipe_to_follow(one: Recomputable | _C.LightSave) -> CountedRecipe | None:
    if isinstance(one, _C.LightSave):
        return one.recipe if one.is_missing else None
    return None if one.discarded is None or not one.must_be_recomputed else one.discarded.counted


class Discarded:
    """The recipe of one discarded storage, and its recomputed bytes.

    `is_exact`: the recompute is bit for bit, provided that its operands are. `check` compares recomputed bytes with the
    discarded ones. Makes `source` release its storage.
    """

    __slots__ = (
        "_check",
        "_facts",
        "_hash",
        "_recomputed",
        "_source",
        "_stream",
        "_transport",
        "_unused_views",
        "counted",
        "is_exact",
    )

    def __init__(
        self,
        facts: StorageFacts,
        source: Source,
        transport: Transport,
        counted: CountedRecipe,
        is_exact: bool = True,
        check: RecomputeCheck | None = None,
    ) -> None:
        self._facts = facts
        self._source = source
        self._transport = transport
        self.counted = counted
        self.is_exact = is_exact
        self._check = check
        self._hash: torch.Tensor | None = None
        if transport.integrity is not None and is_exact:
            self._hash = transport.integrity.hash(facts.address, facts.nbytes, transport.current_stream())
        self._recomputed: torch.UntypedStorage | None = None
        self._stream: _C.Stream | None = None
        self._unused_views = 0
        source.discard()

    def resume(self, storage: torch.UntypedStorage, unused_views: int) -> None:
        """The native gate has recomputed it, and this continues."""
        self._recomputed, self._stream, self._unused_views = storage, self._transport.current_stream(), unused_views

    @property
    def recipe(self) -> RecomputeRecipe:
        recipe: RecomputeRecipe = self.counted.recipe
        return recipe

    @property
    def operands(self) -> Sequence[Operand]:
        return self.recipe.operands

    @property
    def nodes(self) -> Sequence[int]:
        return self.recipe.nodes

    @property
    def is_exact_in_bytes(self) -> bool:
        """True if the recomputed bytes are right for a view of any dtype."""
        return self.is_exact and self.recipe.is_exact_in_bytes

    @property
    def is_ready(self) -> bool:
        """True if the bytes are on the device and the current stream may read them."""
        if self._recomputed is not None:
            return self._stream == self._transport.current_stream()
        return self._source.on_device() is not None

    @property
    def is_recomputed(self) -> bool:
        return self._recomputed is not None

    def forget(self) -> None:
        """Releases the bytes that were recomputed for a trial."""
        self._recomputed = None

    def uncount_use(self) -> None:
        """Takes the use by a trial out of the count of uses."""
        self._unused_views += 1

    def keep_source(self, views: int) -> bool:
        """Holds the source from now on for `views` uses, if another holder still keeps it alive. True if the bytes are
        held.

        Called before an operand is overwritten, after which no recompute is possible.
        """
        source = self._source.on_device()
        if self._recomputed is None and source is not None:
            self._recomputed, self._stream = source, self._transport.current_stream()
            self._unused_views = views
        return self._recomputed is not None

    def recompute(self, unpack: Callable[[Any], torch.Tensor], views: int) -> None:
        """Recomputes the storage on the current stream, for `views` uses. `unpack` unpacks the operands."""
        facts, transport = self._facts, self._transport
        self._recomputed = None
        try:
            storage = self.recipe.recompute(unpack).untyped_storage()
        except OperandModifiedError as error:
            raise error.of(facts.label) from None
        except VdnnError as error:
            raise VdnnError(f"{facts.label}: {error}") from error
        nbytes = facts.nbytes
        if storage.nbytes() != nbytes:
            raise RuntimeError(f"expected a recompute of {nbytes} bytes, got {storage.nbytes()}: {facts.label}")
        stream = transport.current_stream()
        # A lossy codec may have replaced an operand since the discard.
        operands = [operand.managed.discarded for operand in self.recipe.operands]
        self.is_exact = self.is_exact and all(one is None or one.is_exact for one in operands)
        if self._hash is not None and transport.integrity is not None and self.is_exact:
            transport.integrity.compare(facts.label, self._hash, transport.address_of(storage), nbytes, stream)
        if self._check is not None and self.is_exact:
            self._check.compare(transport.address_of(storage), nbytes, stream)
        if transport.is_checked:
            transport.device.note_access(transport.address_of(storage), nbytes, _C.Access.WRITE, stream, "recompute")
        self._recomputed, self._stream = storage, stream
        self._unused_views = views
        facts.counters.recomputes += 1

    def use(self, *, is_kept: bool) -> torch.UntypedStorage:
        """The storage on the device, which is ready. With `is_kept`, the last known use does not release it."""
        recomputed = self._recomputed
        if recomputed is None:
            source = self._source.on_device()
            if source is None:
                raise RuntimeError("the source of a discarded storage was released while a hook used it")
            self._facts.counters.used_in_place += 1
            return source
        self._facts.counters.used_recomputed += 1
        self._unused_views -= 1
        if self._unused_views <= 0 and not is_kept:
            # The last known use: the caller's view keeps the bytes alive as long as it needs them.
            self._recomputed = None
        return recomputed
