"""Which storages are known: those already taken off the device, and those that belong to parameters.

A storage is recognised by its native object, behind a weak reference that keeps the address from being reused; never
by its data pointer. The tables own nothing: entries vanish with the graph, or with the storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.version_check import counter_of, same_counter

UNSAFE_SPLIT = "UnsafeSplitBackward0"


def split_of(tensor: torch.Tensor, node: torch.autograd.graph.Node | None) -> int | None:
    """Which split made it, if an unsafe one did. `node` is its grad_fn.

    [Note: Siblings] Recurrent cells split their gates with torch's unsafe_split: the pieces share bytes, and each has a
    version counter of its own. Pieces of one split that nobody has written to since are of one version: the split's own
    contract says that nobody writes to the whole.
    """
    if node is None or type(node).__name__ != UNSAFE_SPLIT or tensor._version != 0:
        return None
    sequence_nr: int = node._sequence_nr()
    return sequence_nr


TableKey = tuple[int, int, int]  # native address, first byte, bytes

# A weak reference in native hands: an int, whatever the stubs say. While it is not freed its storage's address names no
# other storage.
_weak_handle: Callable[[torch.UntypedStorage], Any] = torch.UntypedStorage._weak_ref
_expired: Any = torch.UntypedStorage._expired
_free_handle: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref


def bytes_to_manage(tensor: torch.Tensor, whole: int) -> tuple[int, int]:
    """The whole storage, so that all its views share one copy; of a large one that is hardly used, the part in use."""
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset()) * itemsize
    reach = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + itemsize * (1 + reach)
    if 2 * (last - first) < whole:
        return first, last - first
    return 0, whole


class StorageReference:
    """A weak reference to a storage that frees itself."""

    __slots__ = ("_handle",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._handle = _weak_handle(storage)

    def expired(self) -> bool:
        return bool(_expired(self._handle))

    def nbytes(self) -> int:
        """Of the storage; 0 when it is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._handle)
        return 0 if storage is None else int(storage.nbytes())

    def __del__(self) -> None:
        _free_handle(self._handle)


class ManagedTable:
    """Managed storages by identity: the same bytes of the same storage, at the same version of the same counter."""

    def __init__(self) -> None:
        self._entries: dict[TableKey, weakref.ref[ManagedStorage]] = {}
        self._latest: dict[int, weakref.ref[ManagedStorage]] = {}  # by native address

    def find(self, key: TableKey, view: torch.Tensor) -> tuple[ManagedStorage, torch.Tensor] | None:
        """What holds these bytes already, and a tensor that shares the view's version counter."""
        reference = self._entries.get(key)
        managed = None if reference is None else reference()
        if managed is None or _expired(managed.storage_handle) or managed.witness._version != managed.version:
            return None
        if same_counter(managed.witness, view):
            return managed, managed.witness
        if (
            managed.split is not None
            and managed.split == split_of(view, view.grad_fn)
            and view._version == managed.version
        ):
            return managed, counter_of(view)
        return None

    def holds(self, address: int) -> bool:
        """Whether the version, or the part of it, that was added last of the storage there is managed and alive."""
        reference = self._latest.get(address)
        managed = None if reference is None else reference()
        return managed is not None and not _expired(managed.storage_handle)

    def add(self, key: TableKey, storage: torch.UntypedStorage, managed: ManagedStorage) -> None:
        """Keeps the storage's address from being reused for as long as `managed` lives."""
        managed.table, managed.table_key, managed.storage_handle = self, key, _weak_handle(storage)
        self._entries[key] = self._latest[key[0]] = managed.reference

    def forget(self, managed: ManagedStorage) -> None:
        """Called when it ends. A newer version may have taken its place."""
        key = managed.table_key
        if self._entries.get(key) is managed.reference:
            self._entries.pop(key, None)
        if self._latest.get(key[0]) is managed.reference:
            self._latest.pop(key[0], None)
        _free_handle(managed.storage_handle)

    def __len__(self) -> int:
        return len(self._entries)


class StorageSet:
    """A set of storages that does not keep them alive. Any thread may add."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}
        # By native address, to be asked before anything else: most storages are in no set, and most sets are empty.
        self.addresses = self._references.keys()
        self._look_at = 64  # looked through for the dead when it has doubled since

    def add(self, storage: torch.UntypedStorage) -> None:
        known = self._references.get(storage._cdata)
        if known is None or known.expired():
            self._references[storage._cdata] = StorageReference(storage)
            if len(self._references) >= self._look_at:
                self._forget_expired()

    def nbytes(self) -> int:
        """Of those that are alive."""
        return sum(known.nbytes() for known in list(self._references.values()))

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        known = self._references.get(storage._cdata)
        return known is not None and not known.expired()

    def _forget_expired(self) -> None:
        """Where parameters are swapped at every call (FSDP), there are new ones as long as the session lasts."""
        for key, known in list(self._references.items()):
            if known.expired() and self._references.get(key) is known:
                self._references.pop(key, None)
        self._look_at = max(64, 2 * len(self._references))

    def __len__(self) -> int:
        return len(self._references)
