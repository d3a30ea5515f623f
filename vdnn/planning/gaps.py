"""Gaps: the stretches of a step in which a storage may be absent, from one access to the next. Planners choose gaps.

A gap is as wide as possible: from the earliest release to a reload at the use. A gap in which the storage would not be
absent for a whole interval frees nothing and is left out.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.planning.recorded_step import recorded_step
from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Recording


class Gap(NamedTuple):
    """Gap `number` of a lifetime: the storage is absent from interval `first` to interval `last`, both included, if it
    is released at `release_point` and reloaded at `use` (None: it is not used again)."""

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
    return tuple(map(Gap._make, recorded_step(recording).gaps))


def planned_lifetimes(recording: Recording, absences: dict[Gap, Absence]) -> tuple[PlannedLifetime, ...]:
    """A plan's lifetimes with these absences; everything else is kept."""
    chosen: list[list[Absence]] = [[] for _ in recording.lifetimes]
    for gap in sorted(absences, key=lambda one: (one.lifetime, one.number)):
        chosen[gap.lifetime].append(absences[gap])
    return tuple(
        PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if of_lifetime else Action.KEEP, tuple(of_lifetime))
        for lifetime, of_lifetime in zip(recording.lifetimes, chosen, strict=True)
    )
