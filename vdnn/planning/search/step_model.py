"""Makes the native core's models of a step from a Recording. The search for a plan asks them thousands of times.

[Note: Native and Python] A search asks the native forms, which answer with times and bytes only; tests compare them.
The Python forms that ship have results that the search does not need: simulate.py makes the whole Timeline of a plan,
recomputing.py and gaps.py make the Recording and the gaps of a step under a plan. The schedule of a choice of gaps and
the search are native alone; their references are in tests/planning/reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, planned_lifetimes
from vdnn.step.plan import Absence, Plan, make_plan
from vdnn.step.recording import PointKind, Recompute, Recording

_KINDS = {PointKind.SAVE: 0, PointKind.USE: 1, PointKind.END: 2}

# Index of a gap, release point, reload point. A reload point of -1 is a reload at the use.
AbsenceTuple = tuple[int, int, int]


def make_step_model(recording: Recording, gaps: Sequence[Gap], costs: LinkCosts) -> _C.StepModel:
    points, lifetimes = recording.points, recording.lifetimes
    return _C.StepModel(
        compute_ns=[point.compute_ns for point in points],
        peak_bytes=[point.peak_bytes for point in points],
        kinds=[_KINDS[point.kind] for point in points],
        storages_of_points=[-1 if point.lifetime is None else point.lifetime for point in points],
        storages=[(one.nbytes, one.copy_point, one.free_point, one.end_point) for one in lifetimes],
        gaps=[(gap.lifetime, _point(gap.use), gap.first, gap.last, gap.release_point) for gap in gaps],
        link=make_link_model(costs),
        issue_ns=[point.issue_ns for point in points],
        copy_issue_ns=costs.issue_ns,
        synchronizes=recording.synchronizes,
    )


def make_link_model(costs: LinkCosts) -> _C.LinkModel:
    return _C.LinkModel(
        to_host_bytes_per_s=costs.to_host_bytes_per_s,
        to_device_bytes_per_s=costs.to_device_bytes_per_s,
        duplex_bytes_per_s=costs.duplex_bytes_per_s,
        latency_ns=costs.latency_ns,
    )


def make_recorded_step(recording: Recording) -> _C.RecordedStep:
    """The native form of with_recomputes() and gaps_of() for one recording."""
    points, lifetimes = recording.points, recording.lifetimes
    return _C.RecordedStep(
        compute_ns=[point.compute_ns for point in points],
        allocated_bytes=[point.allocated_bytes for point in points],
        peak_bytes=[point.peak_bytes for point in points],
        kinds=[_KINDS[point.kind] for point in points],
        lifetimes_of_points=[-1 if point.lifetime is None else point.lifetime for point in points],
        storages=[(one.nbytes, one.copy_point, one.free_point, one.end_point) for one in lifetimes],
        uses=[one.uses for one in lifetimes],
        read=[one.read for one in lifetimes],
        recomputes=[None if one.recompute is None else _tuple_of(one.recompute) for one in lifetimes],
        issue_ns=[point.issue_ns for point in points],
        synchronizes=recording.synchronizes,
    )


def _tuple_of(recompute: Recompute) -> tuple[tuple[int, ...], int, int, int, int, int, int, int, int]:
    return (
        recompute.inputs,
        recompute.known_point,
        recompute.compute_ns,
        recompute.extra_bytes,
        recompute.kept_bytes,
        recompute.discard_ns,
        recompute.discard_bytes,
        recompute.issue_ns,
        recompute.discard_issue_ns,
    )


def absences_by_gap(gaps: Sequence[Gap], absences: Iterable[AbsenceTuple]) -> dict[Gap, Absence]:
    return {gaps[gap]: Absence(release, None if reload < 0 else reload) for gap, release, reload in absences}


def tuples_by_gap(gaps: Sequence[Gap], absences: Mapping[Gap, Absence]) -> list[AbsenceTuple]:
    """The inverse of absences_by_gap()."""
    return [
        (index, absences[gap].release_point, _point(absences[gap].reload_point))
        for index, gap in enumerate(gaps)
        if gap in absences
    ]


def tuples_of_plan(gaps: Sequence[Gap], plan: Plan) -> list[AbsenceTuple]:
    """The absences of any plan, each in the gap that contains its release point."""
    found = []
    for index, gap in enumerate(gaps):
        for absence in plan.lifetimes[gap.lifetime].absences:
            if gap.release_point <= absence.release_point < gap.last:
                found.append((index, absence.release_point, _point(absence.reload_point)))
    return found


def _point(point: int | None) -> int:
    return -1 if point is None else point


def plan_of(
    recording: Recording,
    gaps: Sequence[Gap],
    absences: Iterable[AbsenceTuple],
    policy: str,
    budget_bytes: int | None,
) -> Plan:
    return make_plan(recording, policy, planned_lifetimes(recording, absences_by_gap(gaps, absences)), budget_bytes)
