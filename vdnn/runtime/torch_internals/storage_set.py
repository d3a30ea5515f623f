"""A set of weak references to storages, by which parameters and marked tensors are recognized.

A storage is identified by its native object, never by its data pointer. The weak reference keeps the native address
from being reused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch's native weak reference: an int, although the stubs differ. While it exists, no other storage gets its address.
weak_handle: Callable[[torch.UntypedStorage], Any] = torch.UntypedStorage._weak_ref
is_expired: Any = torch.UntypedStorage._expired
free_handle: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref


class StorageReference:
    """A weak reference to a storage that frees itself."""

    __slots__ = ("_handle",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._handle = weak_handle(storage)

    def expired(self) -> bool:
        return bool(is_expired(self._handle))

    def nbytes(self) -> int:
        """Bytes of the storage, 0 once it is freed."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._handle)
        return 0 if storage is None else int(storage.nbytes())

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)  # None: __init__ was interrupted
        if handle is not None:
            free_handle(handle)


class StorageSet:
    """A set of weak references to storages. Any thread may add to it."""

    def __init__(self) -> None:
        self.references: dict[int, StorageReference] = {}  # by native address
        # Native addresses, for a first test: most storages are not in a set, and most sets are empty.
        self.addresses = self.references.keys()
        self._prune_at = 64  # entries; after pruning, twice the entries that remain

    def add(self, storage: torch.UntypedStorage) -> None:
        known = self.references.get(storage._cdata)
        if known is None or known.expired():
            self.references[storage._cdata] = StorageReference(storage)
            if len(self.references) >= self._prune_at:
                self._prune()

    def nbytes(self) -> int:
        """Bytes of the storages that are alive."""
        return sum(known.nbytes() for known in list(self.references.values()))

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        known = self.references.get(storage._cdata)
        return known is not None and not known.expired()

    def _prune(self) -> None:
        """Removes freed storages. FSDP swaps parameters at every call, so the set would grow as long as the session."""
        for key, known in list(self.references.items()):
            if known.expired() and self.references.get(key) is known:
                self.references.pop(key, None)
        self._prune_at = max(64, 2 * len(self.references))

    def __len__(self) -> int:
        return len(self.references)
