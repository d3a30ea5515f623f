"""The readable form of what csrc/planning/recorded_step.h counts: the bytes of a step under a plan, and its gaps."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap
from vdnn.step.plan import Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


def interval_bytes(recording: Recording, lifetimes: Sequence[PlannedLifetime]) -> list[int]:
    """The peak of every interval with the absences of these lifetimes."""
    change = [0] * (len(recording.points) + 1)
    for lifetime, planned in zip(recording.lifetimes, lifetimes, strict=True):
        for absence in planned.absences:
            absent_in = absent_intervals(lifetime, absence)
            if absent_in:
                change[absent_in.start] -= lifetime.nbytes
                change[absent_in.stop] += lifetime.nbytes
    peaks, absent = [], 0
    for point, more in zip(recording.points, change, strict=False):
        absent += more
        peaks.append(point.peak_bytes + absent)
    return peaks


def stored_bytes(
    recording: Recording,
    lifetimes: Sequence[PlannedLifetime],
    actions: Collection[Action] = (Action.KEEP, Action.OFFLOAD),
) -> list[int]:
    """The bytes of saved storages that are on the device at each point, of those with these actions."""
    change = [0] * (len(recording.points) + 1)
    for lifetime, planned in zip(recording.lifetimes, lifetimes, strict=True):
        if planned.action not in actions:
            continue
        change[lifetime.saves[0]] += lifetime.nbytes
        change[lifetime.end_point] -= lifetime.nbytes
        for absence in planned.absences:
            absent_at = range(absence.release_point, absent_intervals(lifetime, absence).stop - 1)
            if absent_at:
                change[absent_at.start] -= lifetime.nbytes
                change[absent_at.stop] += lifetime.nbytes
    return list(itertools.accumulate(change[:-1]))


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
