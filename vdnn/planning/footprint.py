"""Bytes on the device at every point of a recorded step, when some of its storages are away for a while.

The unit is the interval before a point: from the point before it (exclusive of what happens there) up to it. A storage
released at point r frees from then on, or as soon as nobody else holds it, and takes its room again at its reload.
"""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


def use_after(lifetime: Lifetime, point: int) -> int | None:
    return next((use for use in lifetime.uses if use > point), None)


def absent_intervals(lifetime: Lifetime, absence: Absence) -> range:
    """The intervals, by the point that ends them, in which it holds no device memory."""
    # Freed at the release itself, or in the interval in which the last other holder lets go: that one still counts. And
    # what was used is held until it has been read, whatever is released meanwhile.
    read = (done for use, done in zip(lifetime.uses, lifetime.read, strict=True) if use <= absence.release_point)
    begin = max(absence.release_point, lifetime.free_point, *read) + 1
    back = use_after(lifetime, absence.release_point)
    if absence.reload_point is not None:
        back = absence.reload_point if back is None else min(absence.reload_point, back)
    end = lifetime.end_point if back is None else min(back, lifetime.end_point)
    return range(begin, end + 1)


def interval_bytes(recording: Recording, lifetimes: Sequence[PlannedLifetime]) -> list[int]:
    """The peak of every interval under the plan."""
    change = [0] * (len(recording.points) + 1)
    for lifetime, planned in zip(recording.lifetimes, lifetimes, strict=True):
        for absence in planned.absences:
            away = absent_intervals(lifetime, absence)
            if away:
                change[away.start] -= lifetime.nbytes
                change[away.stop] += lifetime.nbytes
    peaks, absent = [], 0
    for point, more in zip(recording.points, change, strict=False):
        absent += more
        peaks.append(point.peak_bytes + absent)
    return peaks


def offload_everything(recording: Recording) -> tuple[PlannedLifetime, ...]:
    """Each given up as soon as its copy exists and again after every use, and brought back when it is used: the least
    memory there is. What is never away for a whole interval is kept."""
    return tuple(_away_as_much_as_it_can_be(lifetime) for lifetime in recording.lifetimes)


def _away_as_much_as_it_can_be(lifetime: Lifetime) -> PlannedLifetime:
    releases = [lifetime.copy_point, *(use for use in lifetime.uses if use > lifetime.copy_point)]
    absences = tuple(absence for point in releases if absent_intervals(lifetime, absence := Absence(point)))
    return PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if absences else Action.KEEP, absences)
