"""The life of a managed storage in a step that is watched, and the interface of what watches it."""

from __future__ import annotations

from typing import Protocol

from vdnn import _C
from vdnn.runtime.storage.transport import Transport


class WatchedLifetime:
    """One lifetime of one step, which `observer` stands for.

    `number`: among the lifetimes of the step, None for encoded bytes, which no recording has. `planned`: among the
    lifetimes of the plan, or of the plan that is made of this step; None if the plan does not have it.
    """

    __slots__ = ("number", "observer", "planned")

    def __init__(self, observer: StepObserver, number: int | None, planned: int | None = None) -> None:
        self.observer = observer
        self.number = number
        self.planned = planned


class StepObserver(Protocol):
    """Called at each stage of the copies of a managed storage, on the thread of the hook."""

    def completed(self, watched: WatchedLifetime) -> None:
        """The operation that saved it is over, so that its bytes may be copied."""

    def about_to_reload(self, watched: WatchedLifetime) -> None:
        """A reload or a recompute is next; its target is not allocated yet."""

    def released_reload(self, watched: WatchedLifetime) -> None:
        """The runtime released its reference to a reloaded or recomputed copy."""

    def offloaded(self, watched: WatchedLifetime, transport: Transport, copy: _C.HostCopy) -> None:
        """The copy to the host was issued."""

    def refused(self, watched: WatchedLifetime, nbytes: int) -> None:
        """The copy to the host was refused: the storage of this many bytes stays on the device."""

    def reloaded(self, watched: WatchedLifetime, reload: _C.Reload) -> None:
        """The copy to the device was issued."""

    def reloaded_ahead(self, watched: WatchedLifetime) -> None:
        """That copy was issued ahead of its use."""

    def ended(self, watched: WatchedLifetime) -> None:
        """The last view was freed. Called on any thread, also after the step is over."""
