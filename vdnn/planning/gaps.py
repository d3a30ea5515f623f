"""Gaps: the stretches of a step in which a storage may be away, from one access to the next. What a planner chooses.

A gap is widest when the storage is given up as soon as it can be and brought back when it is used. Only gaps in which
it is away for at least one whole interval count: others free nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.planning.footprint import absent_intervals, offload_everything, use_after
from vdnn.recording import Recording
from vdnn.step_plan import Absence, Action, PlannedLifetime


@dataclass(frozen=True, slots=True)
class Gap:
    """Of one lifetime, the `number`-th of its gaps. Away it is from interval `first` to interval `last`, both included,
    when it is given up at `release_point` and brought back at `use`; None: it is not used again."""

    lifetime: int
    number: int
    nbytes: int
    release_point: int
    use: int | None
    first: int
    last: int


def gaps_of(recording: Recording) -> tuple[Gap, ...]:
    """In the order in which copies out are issued; of one lifetime in the order of its uses."""
    found = []
    for index, (lifetime, widest) in enumerate(zip(recording.lifetimes, offload_everything(recording), strict=True)):
        for number, absence in enumerate(widest.absences):
            away = absent_intervals(lifetime, absence)
            use = use_after(lifetime, absence.release_point)
            found.append(Gap(index, number, lifetime.nbytes, absence.release_point, use, away.start, away.stop - 1))
    copied = [(lifetime.copy_point, index) for index, lifetime in enumerate(recording.lifetimes)]
    return tuple(sorted(found, key=lambda gap: (*copied[gap.lifetime], gap.number)))


def planned_lifetimes(recording: Recording, absences: dict[Gap, Absence]) -> tuple[PlannedLifetime, ...]:
    """Everything kept but for these."""
    chosen: list[list[Absence]] = [[] for _ in recording.lifetimes]
    for gap in sorted(absences, key=lambda one: (one.lifetime, one.number)):
        chosen[gap.lifetime].append(absences[gap])
    return tuple(
        PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if away else Action.KEEP, tuple(away))
        for lifetime, away in zip(recording.lifetimes, chosen, strict=True)
    )
