"""Bytes on the device at every point of a recorded step under a plan.

The unit is the interval before a point: from after the previous point up to this one. A storage that is released at
point r frees its memory there, or when its last other holder releases it, and takes the memory again at its reload.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vdnn.planning.recorded_step import recorded_step
from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


def use_after(lifetime: Lifetime, point: int) -> int | None:
    return next((use for use in lifetime.uses if use > point), None)


def absent_intervals(lifetime: Lifetime, absence: Absence) -> range:
    """The intervals in which the storage holds no device memory. The point that ends an interval names it."""
    # The memory is freed at the release, or in the interval in which the last other holder releases it: that interval
    # still counts as held. A storage that was used is held until its use has been read.
    read = (done for use, done in zip(lifetime.uses, lifetime.read, strict=True) if use <= absence.release_point)
    begin = max(absence.release_point, lifetime.free_point, *read) + 1
    reload_at = use_after(lifetime, absence.release_point)
    if absence.reload_point is not None:
        reload_at = absence.reload_point if reload_at is None else min(absence.reload_point, reload_at)
    end = lifetime.end_point if reload_at is None else min(reload_at, lifetime.end_point)
    return range(begin, end + 1)


def interval_bytes(recording: Recording, lifetimes: Sequence[PlannedLifetime]) -> list[int]:
    """The peak of every interval with the absences of these lifetimes."""
    return recorded_step(recording).interval_bytes(lifetimes)


def stored_bytes(
    recording: Recording,
    lifetimes: Sequence[PlannedLifetime],
    actions: Collection[Action] = (Action.KEEP, Action.OFFLOAD),
) -> list[int]:
    """The bytes of saved storages that are on the device at each point, of those with these actions."""
    return recorded_step(recording).stored_bytes(lifetimes, [one.action in actions for one in lifetimes])


def offload_everything(recording: Recording) -> tuple[PlannedLifetime, ...]:
    """Releases each storage as soon as its copy exists and again after every use, and reloads it at its use. No plan
    needs less memory. A storage that would not be absent for a whole interval is kept."""
    return tuple(_offload_at_every_gap(lifetime) for lifetime in recording.lifetimes)


def _offload_at_every_gap(lifetime: Lifetime) -> PlannedLifetime:
    releases = [lifetime.copy_point, *(use for use in lifetime.uses if use > lifetime.copy_point)]
    absences = tuple(absence for point in releases if absent_intervals(lifetime, absence := Absence(point)))
    return PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if absences else Action.KEEP, absences)
