"""Makes the native core's model of a step with a choice of gaps, and turns what it finds into plans.

See [Note: Native planning] in vdnn/planning/recorded_step.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, planned_lifetimes
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.step.plan import Absence, Plan, make_plan
from vdnn.step.recording import Recording

# Index of a gap, release point, reload point. A reload point of -1 is a reload at the use.
AbsenceTuple = tuple[int, int, int]


def make_step_model(recording: Recording, gaps: Sequence[Gap], costs: LinkCosts) -> _C.StepModel:
    places = [(gap.lifetime, _point(gap.use), gap.first, gap.last, gap.release_point) for gap in gaps]
    return _C.StepModel(recorded_step(recording), places, make_link_model(costs), costs.issue_ns)


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
