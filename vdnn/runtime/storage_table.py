"""Which storages are known: those already taken off the device, and those that belong to parameters.

A storage is recognised by its native object, behind a weak reference that keeps the address from being reused; never
by its data pointer. The tables own nothing: entries vanish with the graph, or with the storage.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.version_check import counter_of, same_counter


def split_of(tensor: torch.Tensor) -> int | None:
    """Which split made it, if an unsafe one did.

    [Note: Siblings] Recurrent cells split their gates with torch's unsafe_split: the pieces share bytes, and each has a
    version counter of its own. Pieces of one split that nobody has written to since are of one version: the split's own
    contract says that nobody writes to the whole.
    """
    node = tensor.grad_fn
    if node is None or tensor._version != 0 or node.name() != "UnsafeSplitBackward0":
        return None
    sequence_nr: int = node._sequence_nr()
    return sequence_nr


_Key = tuple[int, int, int]  # native address, first byte, bytes


class StorageReference:
    """A weak reference to a storage. While it lives the storage's address names no other storage."""

    __slots__ = ("_address",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address: Any = storage._weak_ref()  # an int, whatever the stubs say

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._address))

    def nbytes(self) -> int:
        """Of the storage; 0 when it is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._address)
        return 0 if storage is None else int(storage.nbytes())

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._address)  # type: ignore[no-untyped-call]


class ManagedTable:
    """Managed storages by identity: the same bytes of the same storage, at the same version of the same counter."""

    def __init__(self) -> None:
        self._entries: dict[_Key, tuple[StorageReference, weakref.ref[ManagedStorage]]] = {}
        self._latest: dict[int, tuple[StorageReference, weakref.ref[ManagedStorage]]] = {}  # by native address

    def find(
        self, storage: torch.UntypedStorage, begin: int, nbytes: int, view: torch.Tensor
    ) -> tuple[ManagedStorage, torch.Tensor] | None:
        """What holds these bytes already, and a tensor that shares the view's version counter."""
        entry = self._entries.get((storage._cdata, begin, nbytes))
        if entry is None:
            return None
        alive, reference = entry
        managed = reference()
        if managed is None or alive.expired() or managed.witness._version != managed.version:
            return None
        if same_counter(managed.witness, view):
            return managed, managed.witness
        if managed.split is not None and managed.split == split_of(view) and view._version == managed.version:
            return managed, counter_of(view)
        return None

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether the version, or the part of it, that was added last is managed and alive."""
        entry = self._latest.get(storage._cdata)
        return entry is not None and not entry[0].expired() and entry[1]() is not None

    def add(self, storage: torch.UntypedStorage, managed: ManagedStorage) -> None:
        key = (storage._cdata, managed.begin, managed.nbytes)
        entry = (StorageReference(storage), weakref.ref(managed, lambda gone: self._remove(key, gone)))
        self._entries[key] = self._latest[key[0]] = entry

    def _remove(self, key: _Key, gone: weakref.ref[ManagedStorage]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[1] is gone:  # a newer version may have taken the place
            self._entries.pop(key, None)
        entry = self._latest.get(key[0])
        if entry is not None and entry[1] is gone:
            self._latest.pop(key[0], None)

    def __len__(self) -> int:
        return len(self._entries)


class StorageSet:
    """A set of storages that does not keep them alive. Any thread may add."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}
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
