"""Bytes held on the device in every interval: they add up to the step's allocations, for every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.recordings import RESIDENT, chain, compressible, recomputable
from tests.report.steps import BUDGETS, parts, reports, tightest
from vdnn.planning.recomputing import planned_recompute, recording_under
from vdnn.report.held_bytes import HeldBytes, actions_of, held_after, held_before
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, PlannedPoint
from vdnn.step.recording import PointKind, Recording


def kept(recording: Recording) -> list[PlannedLifetime]:
    return [PlannedLifetime(one.nbytes, Action.KEEP) for one in recording.lifetimes]


def plan_of(recording: Recording, lifetimes: list[PlannedLifetime]) -> Plan:
    points = tuple(
        PlannedPoint(one.kind, one.lifetime, one.key) for one in recording_under(recording, lifetimes).points
    )
    return Plan("by hand", "cpu", "by hand", None, points, tuple(lifetimes))


def rest(held: HeldBytes) -> list[int]:
    """Bytes outside of the storages. They are negative if too many storages are counted."""
    managed = held.bytes_of(range(len(held.sizes)))
    return [total - here for total, here in zip(held.total, managed, strict=True)]


def test_with_everything_kept_the_storages_of_a_chain_pile_up_and_go() -> None:
    held = held_before(chain([10, 20, 30]))
    assert held.bytes_of([0, 1, 2]) == [10, 30, 60, 60, 60, 30, 10]
    assert rest(held) == [RESIDENT] * 7
    assert held.besides() == [RESIDENT] * 7
    assert held.ends_ns == (1000, 2000, 3000, 4000, 5000, 6000, 7000)


def test_what_is_offloaded_is_missing_between_release_and_reload() -> None:
    recording = chain([10, 20, 30])
    lifetimes = kept(recording)
    lifetimes[0] = PlannedLifetime(10, Action.OFFLOAD, (Absence(1, 4),))
    held = held_after(recording, plan_of(recording, lifetimes), None)
    # Released at point 1, so absent in the intervals that end at 2, 3 and 4; reloaded at 4.
    assert held.bytes_of([0]) == [10, 10, 0, 0, 0, 10, 10]
    assert rest(held) == [RESIDENT] * 7


def test_what_is_recomputed_is_missing_until_its_first_use() -> None:
    recording = recomputable(chain([10, 20, 30]), 1, inputs=(0,), compute_ns=5)
    lifetimes = kept(recording)
    lifetimes[1] = planned_recompute(recording.lifetimes[1])
    held = held_after(recording, plan_of(recording, lifetimes), None)
    # Points: three saves, the use of 2, the recompute's use of 0, the uses of 1 and 0, the end.
    assert held.bytes_of([1]) == [0, 20, 0, 0, 0, 20, 20, 0]
    assert [here for here in rest(held) if here != RESIDENT] == []


def test_what_a_codec_leaves_is_counted_in_its_place() -> None:
    recording = compressible(recomputable(chain([10, 80, 30]), 1, inputs=(), compute_ns=5), 1, discard_ns=1)
    lifetimes = [*kept(recording), PlannedLifetime(10, Action.KEEP)]
    lifetimes[1] = planned_recompute(recording.lifetimes[1])
    plan = plan_of(recording, lifetimes)
    held = held_after(recording, plan, None)
    assert actions_of(recording, plan) == (Action.KEEP, Action.COMPRESS, Action.KEEP, Action.COMPRESS)
    assert held.sizes == (10, 80, 30, 10)
    assert all(here >= RESIDENT for here in rest(held))
    left = held.bytes_of([3])
    gone = [place for place, here in enumerate(held.bytes_of([1])) if not here and left[place]]
    assert gone, "while it is away its small form is there"


@pytest.mark.parametrize("index", range(len(BUDGETS)))
def test_a_real_step_adds_up_before_and_after(index: int) -> None:
    planned = reports()[index].planned
    before = rest(held_before(planned.recording))
    after = rest(held_after(planned.recording, planned.plan, planned.timeline))
    assert min(before) >= 0
    assert min(after) >= min(before), "no storage is counted where it is not"
    # Besides the storages, the forward pass holds the same bytes with any plan, except at the points of codecs.
    recorded = len(planned.recording.lifetimes)
    first_use = next(place for place, point in enumerate(planned.recording.points) if point.kind is PointKind.USE)
    points = planned.followed.points
    of_step = [here for here, point in zip(after, points, strict=True) if (point.lifetime or 0) < recorded]
    assert before[:first_use] == of_step[:first_use]
    assert max(held_after(planned.recording, planned.plan, None).total) <= planned.timeline.peak_bytes


def test_a_real_step_with_codecs_adds_up() -> None:
    recording, _, _ = parts(tightest())
    packed = [one for one in recording.lifetimes if one.recompute is not None and one.recompute.kept_bytes]
    assert packed, "dropout's mask"
    lifetimes = [
        planned_recompute(one) if one in packed else PlannedLifetime(one.nbytes, Action.KEEP)
        for one in recording.lifetimes
    ]
    lifetimes += [PlannedLifetime(one.recompute.kept_bytes, Action.KEEP) for one in packed if one.recompute]
    before, after = rest(held_before(recording)), rest(held_after(recording, plan_of(recording, lifetimes), None))
    assert min(after) >= min(before)
    assert max(after) <= max(before) + sum(one.recompute.extra_bytes for one in packed if one.recompute)


def test_where_less_was_measured_than_predicted_that_is_the_peak() -> None:
    recording, plan, timeline = parts(tightest())
    half = replace(timeline, marks=tuple(replace(mark, peak_bytes=mark.peak_bytes // 2) for mark in timeline.marks))
    assert held_after(recording, plan, timeline).peak_bytes == timeline.peak_bytes
    assert held_after(recording, plan, half).peak_bytes == timeline.peak_bytes // 2


def test_a_plan_that_moves_nothing_changes_nothing() -> None:
    recording, _, _ = parts(tightest())
    plan = plan_of(recording, kept(recording))
    assert held_after(recording, plan, None) == held_before(recording)


def test_a_point_without_a_mark_is_left_with_the_one_before() -> None:
    recording, plan, timeline = parts(tightest())
    thinned = replace(timeline, marks=timeline.marks[::2])
    ends = held_after(recording, plan, thinned).ends_ns
    assert list(ends) == sorted(ends)
    assert ends[0] == timeline.marks[0].end_ns == ends[1]


def test_without_a_plan_no_storage_has_an_action() -> None:
    recording, plan, _ = parts(tightest())
    assert set(actions_of(recording, None)) == {None}
    assert len(actions_of(recording, plan)) == len(plan.lifetimes)
