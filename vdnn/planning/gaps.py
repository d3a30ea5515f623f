"""Gaps: the stretches of a step in which a storage may be away, from one access to the next. What a planner chooses.

A gap is widest when the storage is given up as soon as it can be and brought back when it is used. Only gaps in which
it is away for at least one whole interval count: others free nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


class Gap(NamedTuple):
    """Of one lifetime, the `number`-th of its gaps. Away it is from interval `first` to interval `last`, both included,
    when it is given up at `release_point` and brought back at `use`; None: it is not used again. A tuple, because a
    search for rebuilds makes those of some hundred steps, and a frozen object takes three times as long."""

    lifetime: int
    number: int
    nbytes: int
    release_point: int
    use: int | None
    first: int
    last: int


def gaps_of(recording: Recording) -> tuple[Gap, ...]:
    """In the order in which copies out are issued; of one lifetime in the order of its uses."""
    found: list[Gap] = []
    for index, lifetime in enumerate(recording.lifetimes):
        found += _gaps_of(index, lifetime)
    lifetimes = recording.lifetimes
    found.sort(key=lambda gap: lifetimes[gap.lifetime].copy_point)
    return tuple(found)


def _gaps_of(index: int, lifetime: Lifetime) -> list[Gap]:
    """The absences of offload_everything() one after the other, without looking through all uses for each of them."""
    found: list[Gap] = []
    release, end = lifetime.copy_point, lifetime.end_point
    held = max(release, lifetime.free_point)  # by others, or by what reads what was used
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
    """Everything kept but for these."""
    chosen: list[list[Absence]] = [[] for _ in recording.lifetimes]
    for gap in sorted(absences, key=lambda one: (one.lifetime, one.number)):
        chosen[gap.lifetime].append(absences[gap])
    return tuple(
        PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if away else Action.KEEP, tuple(away))
        for lifetime, away in zip(recording.lifetimes, chosen, strict=True)
    )
