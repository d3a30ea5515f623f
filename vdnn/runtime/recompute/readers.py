"""An index of readers: the discarded storages that are to be recomputed from a given operand.

Autograd's own operations only read what they unpack. A custom backward may overwrite it, and an optimizer that steps
before the backward is over writes to parameters. Before such a write, the readers of the operand are recomputed. Plain
PyTorch has them in memory at that moment too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from vdnn._C import CountedRecipe, KeptSave, LightSave, Mover, current_form
from vdnn.runtime.recompute.given import Constant, Leaf
from vdnn.runtime.storage.kept import KeptTensor
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView

_current_node: Callable[[], object] = torch._C._current_autograd_node
_FOREIGN = ("NoneType", "CppFunction")  # CppFunction: any C++ node that torch has no class for
overwrites: dict[type, bool] = {}  # by class of C++ node: a bounded number


class Readers:
    """One session's index. It keeps nothing alive. `discarded` has the storages that Python discarded, as weak
    references; the gate tests if there are any. The index by operand is made when something is first overwritten
    after a discard: most programs overwrite nothing."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[ManagedStorage] = weakref.WeakSet()
        self.discarded: set[weakref.ref[ManagedStorage]] = self._living.data  # type: ignore[attr-defined]
        self._by_source: dict[int, list[weakref.ref[ManagedStorage | LightSave]]] | None = None
        self.mover: Mover | None = None  # which discards storages itself

    @property
    def are_there(self) -> bool:
        """True if anything was discarded and is alive."""
        if self.discarded:
            return True
        mover = self.mover
        return mover is not None and mover.has_discarded

    def add(self, reader: ManagedStorage) -> None:
        """Notes that `reader` was discarded."""
        self._living.add(reader)
        self._by_source = None

    def forget_index(self) -> None:
        """A save has another form from now on, or the gate has discarded something: the index is made anew."""
        self._by_source = None

    def of(self, source: ManagedStorage | KeptSave | torch.Tensor) -> list[ManagedStorage]:
        """The readers that are not recomputed yet. If an id was reused there may be too many, which only costs time."""
        if self._by_source is None:
            self._by_source = self._index()
        found = [reader() for reader in self._by_source.get(_key(source), ())]
        readers = [one.full().managed if isinstance(one, LightSave) else one for one in found if one is not None]
        return [one for one in readers if one.is_yet_to_be_recomputed]

    def of_all(self, sources: Iterable[torch.Tensor]) -> list[ManagedStorage]:
        return [reader for source in sources for reader in self.of(source)]

    def _index(self) -> dict[int, list[weakref.ref[ManagedStorage | LightSave]]]:
        index: dict[int, list[weakref.ref[ManagedStorage | LightSave]]] = {}
        for reader in (*self._living, *(() if self.mover is None else self.mover.discarded())):
            counted = reader.recipe if isinstance(reader, LightSave) else _counted(reader)
            reference = weakref.ref(reader)
            for given in () if counted is None else counted.recipe.given:
                if not isinstance(given, Constant):
                    index.setdefault(_key_of(given), []).append(reference)
        return index


def _counted(reader: ManagedStorage) -> CountedRecipe | None:
    return None if reader.discarded is None else reader.discarded.counted


def _key_of(given: PackedView | KeptSave | LightSave | KeptTensor | Leaf) -> int:
    now = current_form(given)  # Python may have the save since the recipe was found, as after a trial
    if isinstance(now, PackedView):
        return id(now.managed)
    if isinstance(now, LightSave):
        return id(now.witness)
    return _key(now if isinstance(now, KeptSave) else now[0])


def _key(source: ManagedStorage | KeptSave | torch.Tensor) -> int:
    """All kept saves of a lifetime have one key. No object has its id."""
    return -1 - (source.step << 32 | source.lifetime) if isinstance(source, KeptSave) else id(source)


def may_be_overwritten() -> bool:
    """True if the code that unpacks now may write to the tensor: a custom backward, or code that is not known."""
    kind = type(_current_node())  # NoneType outside of a backward
    try:
        return overwrites[kind]
    except KeyError:
        if issubclass(kind, torch.autograd.function.BackwardCFunction):
            return True
        overwrites[kind] = kind.__name__ in _FOREIGN
        return overwrites[kind]
