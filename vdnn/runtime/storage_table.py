"""Which storages are known: those already taken off the device, and those that belong to parameters.

A storage is recognised by its native object, behind a weak reference that keeps the address from being reused; never
by its data pointer. The tables own nothing: entries vanish with the graph, or with the storage.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.version_check import same_counter

_Key = tuple[int, int, int]  # native address, first byte, bytes


class StorageReference:
    """A weak reference to a storage. While it lives the storage's address names no other storage."""

    __slots__ = ("_address",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address: Any = storage._weak_ref()  # an int, whatever the stubs say

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._address))

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._address)  # type: ignore[no-untyped-call]


class ManagedTable:
    """Managed storages by identity: the same bytes of the same storage, at the same version of the same counter."""

    def __init__(self) -> None:
        self._entries: dict[_Key, tuple[StorageReference, weakref.ref[ManagedStorage]]] = {}

    def find(self, storage: torch.UntypedStorage, begin: int, nbytes: int, view: torch.Tensor) -> ManagedStorage | None:
        entry = self._entries.get((storage._cdata, begin, nbytes))
        if entry is None:
            return None
        alive, reference = entry
        managed = reference()
        if managed is None or alive.expired() or managed.witness._version != managed.version:
            return None
        return managed if same_counter(managed.witness, view) else None

    def add(self, storage: torch.UntypedStorage, managed: ManagedStorage) -> None:
        key = (storage._cdata, managed.begin, managed.nbytes)
        self._entries[key] = (StorageReference(storage), weakref.ref(managed, lambda gone: self._remove(key, gone)))

    def _remove(self, key: _Key, gone: weakref.ref[ManagedStorage]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[1] is gone:  # a newer version may have taken the place
            self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)


class StorageSet:
    """A set of storages that does not keep them alive."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        known = self._references.get(storage._cdata)
        if known is None or known.expired():
            self._references[storage._cdata] = StorageReference(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        known = self._references.get(storage._cdata)
        return known is not None and not known.expired()

    def forget_expired(self) -> None:
        self._references = {key: known for key, known in self._references.items() if not known.expired()}
