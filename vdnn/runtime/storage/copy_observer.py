"""Whom a managed storage tells what becomes of it: the table that knows it, and whoever follows the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vdnn import _C

if TYPE_CHECKING:
    from vdnn.runtime.storage.managed_storage import ManagedStorage


class Table(Protocol):
    """Knows managed storages, weakly."""

    def forget(self, managed: ManagedStorage) -> None: ...


class CopyObserver(Protocol):
    """Is told of every copy: when it may be made, when it was, and before the target of one back is allocated."""

    def completed(self, managed: ManagedStorage) -> None: ...

    def about_to_reload(self, managed: ManagedStorage) -> None: ...

    def gave_up_reload(self, managed: ManagedStorage) -> None: ...

    def offloaded(self, managed: ManagedStorage, copy: _C.HostCopy) -> None: ...

    def reloaded(self, managed: ManagedStorage, reload: _C.Reload) -> None: ...
