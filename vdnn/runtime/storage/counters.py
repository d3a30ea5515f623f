"""Counts of a session, for reports and tests: saves, copies, and bytes that could not be freed.

Kept saves are counted by reason, which answers "why was this not offloaded?".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Kept(Enum):
    """Why a save stays on the device."""

    SMALL = "smaller than min_bytes"
    PARAMETER = "a parameter or buffer, or a view of one"
    PARAMETER_CAST = "autocast's cast of a parameter"
    SUBCLASS = "a tensor subclass or layout that is passed through (sparse, quantized, nested, ...)"
    OTHER_DEVICE = "on a device that this session does not manage"
    POLICY = "the policy keeps it"
    FITS = "no plan yet, and it fits the budget"
    PLAN = "the plan keeps it"
    MARKED = "marked with vdnn.keep"
    PAUSED = "saved under vdnn.paused"
    HOST_FULL = "no host memory"
    REFUSED = "the driver refused the copy"

    # Enum.__hash__ is Python code, and these members are hashed at every save.
    __hash__ = object.__hash__


@dataclass
class Counters:
    """Counts since the session was made."""

    saves: int = 0
    saved_bytes: int = 0  # summed over the saved views, so shared bytes count several times
    kept: Counter[Kept] = field(default_factory=Counter)
    kept_bytes: Counter[Kept] = field(default_factory=Counter)
    storages: int = 0  # offloaded storages; each version of a storage counts
    storage_bytes: int = 0
    shared_saves: int = 0  # saves whose storage was already managed
    # Each unpack of a managed storage is one use, and of one kind. A recompute uses its operands.
    uses: int = 0
    used_in_place: int = 0  # found the bytes still on the device
    demand_reloads: int = 0  # reloaded them
    used_recomputed: int = 0  # found them recomputed, or recomputed them
    prefetched_reloads: int = 0  # issued ahead of a use, which need not come
    reloaded_bytes: int = 0
    freed_bytes: int = 0
    copied_not_freed_bytes: int = 0  # a holder outside the runtime kept the storage alive
    discarded: int = 0  # storages released without a copy, to be recomputed
    discarded_bytes: int = 0
    recomputes: int = 0

    def keep(self, reason: Kept, nbytes: int, saves: int = 1) -> None:
        self.kept[reason] += saves
        self.kept_bytes[reason] += nbytes

    def add(self, other: Counters) -> None:
        """Adds the counts of saves and uses."""
        self.saves += other.saves
        self.saved_bytes += other.saved_bytes
        self.shared_saves += other.shared_saves
        self.uses += other.uses
        self.used_in_place += other.used_in_place
        for reason, saves in other.kept.items():  # Counter.update takes several times as long
            self.kept[reason] += saves
        for reason, nbytes in other.kept_bytes.items():
            self.kept_bytes[reason] += nbytes

    @property
    def used_reloaded(self) -> int:
        """Uses of the fourth kind: they found the bytes reloaded, ahead or for an earlier use."""
        return self.uses - self.used_in_place - self.demand_reloads - self.used_recomputed

    @property
    def reloads(self) -> int:
        return self.demand_reloads + self.prefetched_reloads
