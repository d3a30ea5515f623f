"""Which discarded storages are to be recomputed from what: asked before somebody may write to it.

Autograd's own operations only read what they unpack. A custom backward may overwrite it, and an optimizer that steps
before the backward is over writes to parameters. What reads those is recomputed first, as plain PyTorch has it anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from vdnn.runtime.recompute.recipe import Constant, Recipe
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView

_current_node: Callable[[], object] = torch._C._current_autograd_node
_FOREIGN = ("NoneType", "CppFunction")  # the latter is any node of C++ that torch has no class for
_overwrites: dict[type, bool] = {}  # of nodes of C++, of which there are so many and no more
_LOOK_AT = 64  # entries; looked through for the dead when they have doubled since


class Readers:
    """One session's index. Keeps nothing alive. `by_source` is empty until something is discarded: the hooks ask for
    that first."""

    def __init__(self) -> None:
        self.by_source: dict[int, weakref.WeakSet[ManagedStorage]] = {}
        self._look_at = _LOOK_AT

    def add(self, reader: ManagedStorage, recipe: Recipe) -> None:
        """`reader` was discarded, and is recomputed by `recipe`."""
        for given in recipe.given:
            if isinstance(given, Constant):
                continue
            source: object = given.managed if isinstance(given, PackedView) else given[0]
            self.by_source.setdefault(id(source), weakref.WeakSet()).add(reader)
        if len(self.by_source) >= self._look_at:
            for key in [key for key, readers in self.by_source.items() if not readers]:
                del self.by_source[key]
            self._look_at = max(_LOOK_AT, 2 * len(self.by_source))

    def of(self, source: ManagedStorage | torch.Tensor) -> list[ManagedStorage]:
        """Those that are still missing. An identity that was used again names too many, which costs time only."""
        readers = self.by_source.get(id(source))
        return [] if readers is None else [one for one in readers if one.is_yet_to_be_rebuilt]

    def of_all(self, sources: Iterable[torch.Tensor]) -> list[ManagedStorage]:
        return [reader for source in sources for reader in self.of(source)]


def may_be_overwritten() -> bool:
    """Whether what is unpacked now goes to code that may write to it: a custom backward, or nobody knows whom."""
    kind = type(_current_node())  # of None outside of a backward
    try:
        return _overwrites[kind]
    except KeyError:
        if issubclass(kind, torch.autograd.function.BackwardCFunction):
            return True
        overwrites = _overwrites[kind] = kind.__name__ in _FOREIGN
        return overwrites
