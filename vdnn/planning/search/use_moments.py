"""Corrects plans that need too much memory within a use: its storage is reloaded before the plan's releases there.

At a use the reload comes first and the releases after it (see csrc/planning/step_timeline.h), so for a moment both
storages are on the device. In a plain backward pass, nothing is released at a use. In pipelines, where forward and
backward passes interleave, saves of another micro-batch are released there. The intervals that the search uses do not
show this moment.
If a found plan exceeds the budget there, storages are released one point earlier, which frees no less memory anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.search.step_model import AbsenceTuple, absences_by_gap, tuples_of_plan
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import PointKind, Recording


def with_room_at_uses(followed: Recording, plan: Plan, budget_bytes: int) -> Plan:
    """The plan, corrected as far as possible. `followed`: the step with the plan's recomputes."""
    gaps = gaps_of(followed)
    absences = release_before_uses(followed, gaps, tuples_of_plan(gaps, plan), budget_bytes)
    moved = planned_lifetimes(followed, absences_by_gap(gaps, absences))
    lifetimes = (
        corrected if one.action is Action.OFFLOAD else one for one, corrected in zip(plan.lifetimes, moved, strict=True)
    )
    return replace(plan, lifetimes=tuple(lifetimes))


def release_before_uses(
    recording: Recording, gaps: Sequence[Gap], absences: Sequence[AbsenceTuple], budget_bytes: int
) -> list[AbsenceTuple]:
    """The same absences, with as many as needed released one point earlier, the largest first. An absence that cannot
    begin earlier is not changed."""
    found = list(absences)
    absent_bytes = _absent_bytes(recording, gaps, found)  # in the interval that ends at a point
    released: defaultdict[int, list[int]] = defaultdict(list)  # by point: indices of `found` that free memory there
    for number, (gap, release, _) in enumerate(found):
        if gaps[gap].first <= release + 1:
            released[release].append(number)
    for index in range(len(recording.points) - 1, 0, -1):
        point = recording.points[index]
        if point.kind is not PointKind.USE:
            continue
        nbytes = point.allocated_bytes - absent_bytes[index] + _reloaded_bytes(recording, gaps, found, index)
        for number in sorted(released[index], key=lambda one: -gaps[found[one][0]].nbytes):
            gap, release, reload = found[number]
            if nbytes <= budget_bytes:
                break
            if release - 1 < gaps[gap].release_point or gaps[gap].first > release:
                continue
            found[number] = gap, release - 1, reload
            released[release - 1].append(number)
            absent_bytes[index] += gaps[gap].nbytes
            nbytes -= gaps[gap].nbytes
    return found


def _absent_bytes(recording: Recording, gaps: Sequence[Gap], absences: Sequence[AbsenceTuple]) -> list[int]:
    absent = [0] * (len(recording.points) + 1)
    for gap, release, reload in absences:
        last = gaps[gap].last if reload < 0 else min(reload, gaps[gap].last)
        for interval in range(max(release + 1, gaps[gap].first), last + 1):
            absent[interval] += gaps[gap].nbytes
    return absent


def _reloaded_bytes(recording: Recording, gaps: Sequence[Gap], absences: Sequence[AbsenceTuple], use: int) -> int:
    """Bytes that are reloaded on demand at a use."""
    lifetime = recording.points[use].lifetime
    return sum(
        gaps[gap].nbytes
        for gap, release, reload in absences
        if gaps[gap].lifetime == lifetime and gaps[gap].use == use and reload < 0 and release < use
    )
