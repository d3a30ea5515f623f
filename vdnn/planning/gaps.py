"""Gaps: the stretches of a step in which a storage may be absent, from one access to the next. Planners choose gaps.

A gap is as wide as possible: from the earliest release to a reload at the use. A gap in which the storage would not be
absent for a whole interval frees nothing and is left out.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


class Gap(NamedTuple):
    """Gap `number` of a lifetime: the storage is absent from interval `first` to interval `last`, both included, if it
    is released at `release_point` and reloaded at `use` (None: it is not used again).

    A tuple, because a search for recomputes makes the gaps of some hundred steps, and a frozen dataclass takes three
    times as long.
    """

    lifetime: int
    number: int
    nbytes: int
    release_point: int
    use: int | None
    first: int
    last: int


def gaps_of(recording: Recording) -> tuple[Gap, ...]:
    """All gaps, in the order in which their copies to the host are issued; those of one lifetime in the order of its
    uses."""
    found: list[Gap] = []
    for index, lifetime in enumerate(recording.lifetimes):
        found += _gaps_of(index, lifetime)
    lifetimes = recording.lifetimes
    found.sort(key=lambda gap: lifetimes[gap.lifetime].copy_point)
    return tuple(found)


def _gaps_of(index: int, lifetime: Lifetime) -> list[Gap]:
    """The absences of offload_everything(), found in one pass over the uses."""
    found: list[Gap] = []
    release, end = lifetime.copy_point, lifetime.end_point
    held = max(release, lifetime.free_point)  # by other holders, or by the operation that reads the last use
    for use, done in zip(lifetime.uses, lifetime.read, strict=True):
        if use > release:
            last = use if use < end else end
            if held < last:
                found.append(Gap(index, len(found), lifetime.nbytes, release, use, held + 1, last))
            release = use
        held = max(held, use, done)
    if held < end:
        found.append(Gap(index, len(found), lifetime.nbytes, release, None, held + 1, end))
    return found


def planned_lifetimes(recording: Recording, absences: dict[Gap, Absence]) -> tuple[PlannedLifetime, ...]:
    """A plan's lifetimes with these absences; everything else is kept."""
    chosen: list[list[Absence]] = [[] for _ in recording.lifetimes]
    for gap in sorted(absences, key=lambda one: (one.lifetime, one.number)):
        chosen[gap.lifetime].append(absences[gap])
    return tuple(
        PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if of_lifetime else Action.KEEP, tuple(of_lifetime))
        for lifetime, of_lifetime in zip(recording.lifetimes, chosen, strict=True)
    )
