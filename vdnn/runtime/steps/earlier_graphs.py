"""The storages that graphs of earlier steps still hold on the device: an output or a loss that the program keeps.

No plan of a later step knows them, and nothing of a running step is used later. So a guard that needs room evicts them
first. A storage that somebody else holds, too, is not evicted, because that would free nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vdnn.errors import BudgetError
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.plan import Action


@dataclass(slots=True)
class _EarlierStorage:
    """One storage. `why`: a guard or a plan has kept it, for this reason. `is_refused`: its copy was refused."""

    reference: weakref.ref[ManagedStorage]
    why: Kept | None
    is_refused: bool = False


class EarlierGraphs:
    """The storages that outlived the finished steps of one session."""

    def __init__(self) -> None:
        self._held: list[_EarlierStorage] = []  # the oldest first

    def __bool__(self) -> bool:
        return bool(self._held)

    def step_ended(self, outliving: Iterable[ManagedStorage], kept: Mapping[int, Kept]) -> None:
        """A step ended, and these of its storages are still alive. `kept`: the lifetimes that its guard could still
        have evicted."""
        self._held = [one for one in self._held if one.reference() is not None]
        for managed in outliving:
            number = None if managed.watched is None else managed.watched.number
            self._held.append(_EarlierStorage(managed.reference, None if number is None else kept.get(number)))

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes that they hold on the device: those that can be evicted, and all others."""
        if not self._held:
            return 0, 0
        alive = (one.reference() for one in self._held)
        all_bytes = sum(one.nbytes for one in alive if one is not None and one.is_on_device)
        movable_bytes = sum(managed.nbytes for _, managed in self._movable())
        return movable_bytes, all_bytes - movable_bytes

    def evict(self, nbytes: int) -> int:
        """Evicts storages of this many bytes, the oldest first, or all that can be evicted. Returns how many bytes that
        has freed. The operations that saved them are over, so they are released at once."""
        freed_bytes = 0
        for one, managed in self._movable():
            if freed_bytes >= nbytes:
                break
            if managed.action is Action.KEEP and one.why is not None:
                managed.facts.counters.keep(one.why, -managed.nbytes, saves=-1)
            managed.action = Action.OFFLOAD
            managed.complete()
            managed.release()
            one.is_refused = managed.is_on_device
            freed_bytes += 0 if one.is_refused else managed.nbytes
        return freed_bytes

    def _movable(self) -> list[tuple[_EarlierStorage, ManagedStorage]]:
        alive = [(one, one.reference()) for one in self._held if not one.is_refused]
        return [
            (one, managed)
            for one, managed in alive
            if managed is not None
            and (one.why is not None or managed.action is Action.OFFLOAD)
            and managed.can_be_evicted
        ]


def naming_earlier_graphs(error: BudgetError, nbytes: int) -> BudgetError:
    """The same error, naming the bytes that graphs of earlier steps hold and that cannot be offloaded."""
    return BudgetError(
        budget_bytes=error.budget_bytes,
        least_bytes=error.least_bytes,
        where=error.where,
        resident_bytes=error.resident_bytes,
        foreseen=error.foreseen,
        way_out="Free the outputs and losses of earlier steps, or keep what detach() returns of them",
        earlier_bytes=nbytes,
    )
