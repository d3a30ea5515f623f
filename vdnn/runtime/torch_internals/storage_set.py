"""A set of storages that does not keep them alive: how parameters and marked tensors are recognised.

A storage is recognised by its native object, behind a weak reference that keeps the address from being reused; never by
its data pointer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch's native weak reference: an int, whatever the stubs say. Until it is freed, no other storage gets this address.
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
        free_handle(self._handle)


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
        """Bytes of the storages that are alive."""
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
