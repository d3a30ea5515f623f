"""An index of readers: the discarded storages that are to be recomputed from a given operand.

Autograd's own operations only read what they unpack. A custom backward may overwrite it, and an optimizer that steps
before the backward is over writes to parameters. Before such a write, the readers of the operand are recomputed. Plain
PyTorch has them in memory at that moment too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.recompute.node_notes import current_form
from vdnn.runtime.recompute.recipe import Constant, Leaf, Recipe
from vdnn.runtime.storage.kept import KeptTensor
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView

_current_node: Callable[[], object] = torch._C._current_autograd_node
_FOREIGN = ("NoneType", "CppFunction")  # CppFunction: any C++ node that torch has no class for
overwrites: dict[type, bool] = {}  # by class of C++ node: a bounded number
_LOOK_AT = 64  # entries; each time their number has doubled, dead ones are removed


class Readers:
    """One session's index. It keeps nothing alive. `by_source` is empty until something is discarded; the hooks test
    that first."""

    def __init__(self) -> None:
        self.by_source: dict[int, weakref.WeakSet[ManagedStorage]] = {}
        self._look_at = _LOOK_AT

    def add(self, reader: ManagedStorage, recipe: Recipe) -> None:
        """Note that `reader` was discarded and is recomputed by `recipe`."""
        for given in recipe.given:
            if isinstance(given, Constant):
                continue
            self.by_source.setdefault(_key_of(given), weakref.WeakSet()).add(reader)
        if len(self.by_source) >= self._look_at:
            for key in [key for key, readers in self.by_source.items() if not readers]:
                del self.by_source[key]
            self._look_at = max(_LOOK_AT, 2 * len(self.by_source))

    def replaced(self, source: KeptSave | torch.Tensor, managed: ManagedStorage) -> None:
        """A kept save, or a light storage with this witness, became a managed storage: the same recomputes read it."""
        readers = self.by_source.pop(_key(source), None)
        if readers is not None:
            self.by_source.setdefault(id(managed), weakref.WeakSet()).update(readers)

    def of(self, source: ManagedStorage | KeptSave | torch.Tensor) -> list[ManagedStorage]:
        """The readers that are not recomputed yet. If an id was reused there may be too many, which only costs time."""
        readers = self.by_source.get(_key(source))
        if readers is None:
            return []
        if not readers:
            del self.by_source[_key(source)]
        return [one for one in readers if one.is_yet_to_be_recomputed]

    def of_all(self, sources: Iterable[torch.Tensor]) -> list[ManagedStorage]:
        return [reader for source in sources for reader in self.of(source)]


def _key_of(given: PackedView | KeptSave | LightSave | KeptTensor | Leaf) -> int:
    now = current_form(given)  # Python may have the save since the recipe was found, as after a trial
    if isinstance(now, PackedView):
        return id(now.managed)
    if isinstance(now, LightSave):
        return id(now.witness)
    return _key(now if isinstance(now, KeptSave) else now[0])


def _key(source: ManagedStorage | KeptSave | torch.Tensor) -> int:
    """All kept saves of a lifetime have one key, which csrc/hooks/gate.cpp computes as well. No object has its id."""
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
