"""The two interfaces that a managed storage calls: its table, and the observer that follows the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vdnn import _C

if TYPE_CHECKING:
    from vdnn.runtime.storage.managed_storage import ManagedStorage


class Table(Protocol):
    """Holds weak references to managed storages; a storage removes itself when it is destroyed."""

    def forget(self, managed: ManagedStorage) -> None: ...


class CopyObserver(Protocol):
    """Called at each stage of the copies of a managed storage, on the thread of the hook."""

    def completed(self, managed: ManagedStorage) -> None:
        """The operation that saved the storage is over, so that its bytes may be copied."""

    def about_to_reload(self, managed: ManagedStorage) -> None:
        """A reload or a recompute is next; its target is not allocated yet."""

    def released_reload(self, managed: ManagedStorage) -> None:
        """The runtime released its reference to a reloaded or recomputed copy."""

    def offloaded(self, managed: ManagedStorage, copy: _C.HostCopy) -> None:
        """The copy to the host was issued."""

    def reloaded(self, managed: ManagedStorage, reload: _C.Reload) -> None:
        """The copy to the device was issued."""
