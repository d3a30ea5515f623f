"""Finds the managed storage of a tensor that was saved before: the same bytes of the same storage at the same version.

A storage is recognized by its native object, not by its data pointer, which is reused. The table keeps no storage
alive: an entry is removed when its managed storage is destroyed.

[Note: Reloads that are saved] A double backward saves tensors that were unpacked from a reload. They are the same bytes
at the same version as those that were saved first, so they join that managed storage and need no copy of their own.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

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
    first, end = reach_of(tensor)
    if 2 * (end - first) < whole:
        return first, end - first
    return 0, whole


def reach_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a view in its storage, and the one behind its last."""
    return reach(int(tensor.storage_offset()) * tensor.itemsize, tensor.dtype, tensor.shape, tensor.stride())


def reach(first: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> tuple[int, int]:
    """The same for a view whose first byte is known."""
    elements = 1 + sum((int(one) - 1) * step for one, step in zip(size, stride, strict=True))
    return first, first + dtype.itemsize * elements


def _contains(outer: TableKey, inner: TableKey) -> bool:
    return outer[1] <= inner[1] and inner[1] + inner[2] <= outer[1] + outer[2]


class Version(Protocol):
    """One version of a storage's bytes, which the table finds."""

    witness: torch.Tensor  # it shares the version counter of the saved tensor
    version: int
    reference: weakref.ref[Any]
    entry: TableEntry[Any] | None  # Table.add sets it
    reload_entry: TableEntry[Any] | None  # Table.add_reload sets it


Found = TypeVar("Found", bound=Version)


class TableEntry(Generic[Found]):
    """One version in a table. The version owns its entry, and removes it when it is destroyed."""

    __slots__ = ("_handle", "_table", "begin", "container", "found", "key", "split")

    def __init__(
        self,
        table: Table[Found],
        key: TableKey,
        storage: torch.UntypedStorage,
        found: weakref.ref[Found],
        split: int | None,
        begin: int,
    ) -> None:
        self._handle = weak_handle(storage)  # keeps the native address from being reused
        self._table = table
        self.key = key
        self.found = found
        self.begin = begin  # of the version's bytes in the storage
        self.split = split  # see [Note: Siblings]
        self.container: weakref.ref[Found] | None = None  # a larger part that was saved later

    @property
    def is_expired(self) -> bool:
        """True if the storage was freed."""
        return bool(is_expired(self._handle))

    def remove(self) -> None:
        """Called once, when the version is destroyed. The entry of a newer version may have replaced this one."""
        key, entries, latest = self.key, self._table.entries, self._table.latest
        if entries.get(key) is self:
            entries.pop(key, None)
        if latest.get(key[0]) is self:
            latest.pop(key[0], None)
        free_handle(self._handle)


@dataclass(slots=True)
class Match(Generic[Found]):
    """`witness` shares the version counter of the view that was looked up; `begin` is where the version's bytes begin
    in the storage of that view."""

    found: Found
    witness: torch.Tensor
    begin: int


class Table(Generic[Found]):
    """Versions by identity: bytes of a storage, version counter and version."""

    def __init__(self) -> None:
        self.entries: dict[TableKey, TableEntry[Found]] = {}
        self.latest: dict[int, TableEntry[Found]] = {}  # by native address

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """True if a version of these bytes, or of a part of them, was added."""
        return storage._cdata in self.latest

    def find(self, key: TableKey, whole: int, view: torch.Tensor) -> Match[Found] | None:
        """The version that has these bytes of a storage of `whole` bytes, alone or with others around them."""
        known = self._find(key, view)
        if known is None and key[2] < whole:
            known = self._find((key[0], 0, whole), view) or self._find_around(key, view)
        return known

    def _find(self, key: TableKey, view: torch.Tensor) -> Match[Found] | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        found, split = entry.found(), entry.split
        if found is None or entry.is_expired or found.witness._version != found.version:
            return None
        if same_counter(found.witness, view):
            return Match(found, found.witness, entry.begin)
        if split is not None and split == split_of(view, view.grad_fn) and view._version == found.version:
            return Match(found, counter_of(view), entry.begin)
        return None

    def _find_around(self, key: TableKey, view: torch.Tensor) -> Match[Found] | None:
        """The part of the storage that was added last, if it contains this one."""
        entry = self.latest.get(key[0])
        return None if entry is None or not _contains(entry.key, key) else self._find(entry.key, view)

    def add(self, key: TableKey, storage: torch.UntypedStorage, found: Found, split: int | None) -> None:
        """Adds the version, and gives it its entry. `split` is that of the saved tensor: see split_of."""
        entry = found.entry = TableEntry(self, key, storage, found.reference, split, key[1])
        latest = self.latest.get(key[0])
        if latest is not None:
            part = latest.found()
            if part is not None and _contains(key, latest.key) and same_counter(part.witness, found.witness):
                latest.container = found.reference
        self.entries[key] = self.latest[key[0]] = entry

    def add_reload(self, reload: torch.UntypedStorage, found: Found, begin: int) -> None:
        """Adds a reload of the version, whose bytes begin at `begin` in it. See [Note: Reloads that are saved]."""
        address, earlier = reload._cdata, found.reload_entry
        if earlier is not None:
            if earlier.key[0] == address:
                return
            earlier.remove()
        entry = found.reload_entry = TableEntry(
            self, (address, 0, reload.nbytes()), reload, found.reference, None, begin
        )
        self.entries[entry.key] = self.latest[address] = entry

    def __len__(self) -> int:
        return len(self.entries)
