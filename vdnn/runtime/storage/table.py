"""Finds the managed storage of a tensor that was saved before: the same bytes of the same storage at the same version.

A storage is recognized by its native object, not by its data pointer, which is reused. The table owns nothing: an entry
is removed when its managed storage is destroyed.
"""

from __future__ import annotations

import weakref

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.torch_internals.storage_set import free_handle, is_expired, weak_handle
from vdnn.runtime.torch_internals.version_counter import counter_of, same_counter

UNSAFE_SPLIT = "UnsafeSplitBackward0"


def split_of(tensor: torch.Tensor, node: torch.autograd.graph.Node | None) -> int | None:
    """The number of the unsafe_split that made `tensor`, None if none did. `node` is the grad_fn of `tensor`.

    [Note: Siblings] Recurrent cells split their gates with torch's unsafe_split: the pieces share bytes, but each has a
    version counter of its own. Unmodified pieces of one split have one version, because the contract of unsafe_split
    forbids writes to the whole.
    """
    if node is None or type(node).__name__ != UNSAFE_SPLIT or tensor._version != 0:
        return None
    sequence_nr: int = node._sequence_nr()
    return sequence_nr


TableKey = tuple[int, int, int]  # native address, first byte, bytes


def bytes_to_manage(tensor: torch.Tensor, whole: int) -> tuple[int, int]:
    """First byte and number of bytes to manage, for a view of a storage of `whole` bytes.

    The whole storage, so that all its views share one copy; or only the view's part, if that is less than half.
    """
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset()) * itemsize
    reach = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + itemsize * (1 + reach)
    if 2 * (last - first) < whole:
        return first, last - first
    return 0, whole


def _contains(outer: TableKey, inner: TableKey) -> bool:
    return outer[1] <= inner[1] and inner[1] + inner[2] <= outer[1] + outer[2]


class ManagedTable:
    """Managed storages by identity: bytes of a storage, version counter and version."""

    def __init__(self) -> None:
        self._entries: dict[TableKey, weakref.ref[ManagedStorage]] = {}
        self._latest: dict[int, weakref.ref[ManagedStorage]] = {}  # by native address

    def find(self, key: TableKey, view: torch.Tensor) -> tuple[ManagedStorage, torch.Tensor] | None:
        """The managed storage of these bytes, and a tensor that shares the view's version counter."""
        reference = self._entries.get(key)
        managed = None if reference is None else reference()
        if managed is None or is_expired(managed.storage_handle) or managed.witness._version != managed.version:
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

    def find_around(self, key: TableKey, view: torch.Tensor) -> tuple[ManagedStorage, torch.Tensor] | None:
        """Like `find`, for a part of a storage: the part that was added last, if it contains this one."""
        managed = self._latest_at(key[0])
        return None if managed is None or not _contains(managed.table_key, key) else self.find(managed.table_key, view)

    def _latest_at(self, address: int) -> ManagedStorage | None:
        reference = self._latest.get(address)
        return None if reference is None else reference()

    def holds(self, address: int) -> bool:
        """True if the version or part that was added last, of the storage at this native address, is alive."""
        managed = self._latest_at(address)
        return managed is not None and not is_expired(managed.storage_handle)

    def add(self, key: TableKey, storage: torch.UntypedStorage, managed: ManagedStorage) -> None:
        """Adds `managed`. Its weak handle keeps the native address from being reused while `managed` is alive."""
        part = self._latest_at(key[0])
        if part is not None and _contains(key, part.table_key) and same_counter(part.witness, managed.witness):
            part.container = managed.reference
        managed.table, managed.table_key, managed.storage_handle = self, key, weak_handle(storage)
        self._entries[key] = self._latest[key[0]] = managed.reference

    def forget(self, managed: ManagedStorage) -> None:
        """Removes `managed`, which is being destroyed, unless a newer version has replaced its entry."""
        key = managed.table_key
        if self._entries.get(key) is managed.reference:
            self._entries.pop(key, None)
        if self._latest.get(key[0]) is managed.reference:
            self._latest.pop(key[0], None)
        free_handle(managed.storage_handle)

    def __len__(self) -> int:
        return len(self._entries)
