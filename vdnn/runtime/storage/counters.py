"""What the runtime counted: saves by what became of them, copies, and bytes that could not be freed.

Plain numbers, for reports and tests. Skips are counted by reason, so that "why was this not offloaded?" has an answer.
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
    PLAN = "the plan keeps it"
    MARKED = "marked with vdnn.keep"
    PAUSED = "saved under vdnn.paused"
    SLICE = "a small part of a large storage"
    HOST_FULL = "no host memory"
    REFUSED = "the driver refused the copy"

    # Enum's own hash is Python code, and these are counted at every save.
    __hash__ = object.__hash__


@dataclass
class Counters:
    """Of one session, since it was made."""

    saves: int = 0
    saved_bytes: int = 0  # of views, as autograd sees them
    kept: Counter[Kept] = field(default_factory=Counter)
    kept_bytes: Counter[Kept] = field(default_factory=Counter)
    storages: int = 0  # offloaded: one per storage version
    storage_bytes: int = 0
    shared_saves: int = 0  # saves that found their storage already taken
    uses: int = 0  # unpacks of offloaded storages
    used_in_place: int = 0  # of these, the bytes were still on the device
    demand_reloads: int = 0
    prefetched_reloads: int = 0
    reloaded_bytes: int = 0
    freed_bytes: int = 0
    copied_not_freed_bytes: int = 0  # somebody else still held the storage
    dropped: int = 0  # storages given up without a copy, to be rebuilt
    dropped_bytes: int = 0
    rebuilds: int = 0

    def keep(self, reason: Kept, nbytes: int) -> None:
        self.kept[reason] += 1
        self.kept_bytes[reason] += nbytes

    @property
    def reloads(self) -> int:
        return self.demand_reloads + self.prefetched_reloads
