"""The moment within a use at which what it needs is back, and what the plan gives up there is not gone yet.

Releases come behind a use's own copy back: simulate.py tells the order. Where the backward only takes, nothing is given
up at a use. Where forwards and backwards interleave (pipelines), one micro-batch's saves are, and for a moment both are
there. The intervals that plans are searched with do not show it; so a plan that was found and needs too much is looked
through, and what is too much at a use is given up a point before it. That frees no less anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.recomputing import recording_under
from vdnn.planning.search.step_model import AbsenceTuple, absences_by_gap, tuples_of_plan
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import PointKind, Recording


def with_room_at_uses(recording: Recording, plan: Plan, budget_bytes: int) -> Plan:
    """The plan of the step that was recorded without any, mended as far as that is possible."""
    followed = recording_under(recording, plan.lifetimes)
    gaps = gaps_of(followed)
    absences = give_up_before_uses(followed, gaps, tuples_of_plan(gaps, plan), budget_bytes)
    moved = planned_lifetimes(followed, absences_by_gap(gaps, absences))
    lifetimes = (
        mended if one.action is Action.OFFLOAD else one for one, mended in zip(plan.lifetimes, moved, strict=True)
    )
    return replace(plan, lifetimes=tuple(lifetimes))


def give_up_before_uses(
    recording: Recording, gaps: Sequence[Gap], absences: Sequence[AbsenceTuple], budget_bytes: int
) -> list[AbsenceTuple]:
    """The same absences, as many as need be given up earlier: of several the largest. What cannot be, stays."""
    found = list(absences)
    away_bytes = _away_bytes(recording, gaps, found)  # in the interval that ends at a point
    released: defaultdict[int, list[int]] = defaultdict(list)  # at a point, and gone at once: places in `found`
    for place, (gap, release, _) in enumerate(found):
        if gaps[gap].first <= release + 1:
            released[release].append(place)
    for index in range(len(recording.points) - 1, 0, -1):
        point = recording.points[index]
        if point.kind is not PointKind.USE:
            continue
        there = point.allocated_bytes - away_bytes[index] + _back_bytes(recording, gaps, found, index)
        for place in sorted(released[index], key=lambda one: -gaps[found[one][0]].nbytes):
            gap, release, reload = found[place]
            if there <= budget_bytes:
                break
            if release - 1 < gaps[gap].release_point or gaps[gap].first > release:
                continue
            found[place] = gap, release - 1, reload
            released[release - 1].append(place)
            away_bytes[index] += gaps[gap].nbytes
            there -= gaps[gap].nbytes
    return found


def _away_bytes(recording: Recording, gaps: Sequence[Gap], absences: Sequence[AbsenceTuple]) -> list[int]:
    away = [0] * (len(recording.points) + 1)
    for gap, release, reload in absences:
        last = gaps[gap].last if reload < 0 else min(reload, gaps[gap].last)
        for interval in range(max(release + 1, gaps[gap].first), last + 1):
            away[interval] += gaps[gap].nbytes
    return away


def _back_bytes(recording: Recording, gaps: Sequence[Gap], absences: Sequence[AbsenceTuple], use: int) -> int:
    """What comes back at a use because it was not asked for before."""
    lifetime = recording.points[use].lifetime
    return sum(
        gaps[gap].nbytes
        for gap, release, reload in absences
        if gaps[gap].lifetime == lifetime and gaps[gap].use == use and reload < 0 and release < use
    )
