"""Rewrites a recording for a choice of recomputes: the Recording of the step in which these storages are discarded.

The native core computes the step; see [Note: Recomputes as points] in csrc/planning/recorded_step.h.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from vdnn import _C
from vdnn.errors import InvalidArgumentError
from vdnn.planning.recorded_step import keep_step, recorded_step
from vdnn.step.plan import Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey, key_of_encoded


def candidates_of(recording: Recording) -> list[int]:
    """Lifetimes that can be recomputed and would then be absent for an interval; the least cost per byte first."""
    return recorded_step(recording).candidates(by_issue=False)


def cost_ns(recompute: Recompute) -> int:
    """Time of the discard and of the recompute."""
    return recompute.discard_ns + recompute.compute_ns


def host_cost_ns(recompute: Recompute) -> int:
    """Time in which the host issues the discard and the recompute."""
    return recompute.issue_ns + (recompute.discard_issue_ns if recompute.kept_bytes else 0)


def planned_recompute(lifetime: Lifetime) -> PlannedLifetime:
    """RECOMPUTE for a lifetime that has a recipe, or COMPRESS if a codec leaves a part of it."""
    if lifetime.recompute is None:
        raise RuntimeError("planned_recompute: expected a lifetime that can be recomputed, got one without a recipe")
    action = Action.COMPRESS if lifetime.recompute.kept_bytes else Action.RECOMPUTE
    return PlannedLifetime(lifetime.nbytes, action)


def recording_under(recording: Recording, planned: Sequence[PlannedLifetime]) -> Recording:
    """The step with the recomputes of these planned lifetimes."""
    return with_recomputes(recording, [index for index, one in enumerate(planned) if one.is_recomputed])


def with_recomputes(recording: Recording, chosen: Collection[int]) -> Recording:
    """The step in which the lifetimes `chosen` are recomputed by the recipes of the recording. All lifetimes keep their
    numbers, and the encoded storages of codecs come after them. Raises VdnnError for a lifetime without a recipe."""
    if not chosen:
        return recording
    encoded = []  # the keys of encoded storages
    for index in sorted(set(chosen)):
        recompute = recording.lifetimes[index].recompute
        if recompute is None:
            raise InvalidArgumentError(
                argument="plan",
                expected="lifetimes to recompute for which the recording has a recipe",
                got=f"lifetime {index}, for which it has none. Plan the recorded step again",
            )
        if recompute.kept_bytes:
            saved = recording.points[recording.lifetimes[index].saves[0]].key
            key = None if saved is None else key_of_encoded(saved, recompute.operation, recompute.kept_bytes)
            encoded.append(key)
    step = recorded_step(recording).recomputed(sorted(set(chosen)))
    lifetimes = tuple([Lifetime(*one) for one in step.lifetimes])
    followed = replace(recording, points=_points_of(recording, step, encoded), lifetimes=lifetimes)
    keep_step(followed, step)
    return followed


def _points_of(recording: Recording, step: _C.RecordedStep, encoded: Sequence[SaveKey | None]) -> tuple[Point, ...]:
    """The points of the step with recomputes, with what the native core does not know of them."""
    before, count, points = recording.points, len(recording.lifetimes), []
    for recorded, is_save, lifetime, compute_ns, allocated_bytes, peak_bytes, issue_ns in step.points:
        kind, key, operation = PointKind.USE, None, ""
        if recorded >= 0:
            old = before[recorded]
            kind, key, operation = old.kind, old.key, old.operation
        elif is_save and lifetime is not None:
            kind, key = PointKind.SAVE, encoded[lifetime - count]
        points.append(Point(kind, lifetime, key, compute_ns, allocated_bytes, peak_bytes, operation, issue_ns))
    return tuple(points)
