"""At a use, the reloaded storage and those that are released there are on the device together: plans count this
moment."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.recordings import RESIDENT, any_recording, key
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.search.step_model import AbsenceTuple, plan_of
from vdnn.planning.search.use_moments import release_before_uses
from vdnn.planning.simulate import simulate
from vdnn.step.recording import Lifetime, Point, PointKind, Recording

FAST = LinkCosts(1e9, 1e9, 2e9, 0)
SAVE, USE = PointKind.SAVE, PointKind.USE


def step_of(events: list[tuple[PointKind, int]], sizes: list[int]) -> Recording:
    """A step of storages that are saved once, used once, and released after their use."""
    end = len(events)
    lifetimes = []
    for index, nbytes in enumerate(sizes):
        saved, used = events.index((SAVE, index)), events.index((USE, index))
        lifetimes.append(Lifetime(nbytes, (saved,), (used,), (used + 1,), saved, saved, used + 1))
    points = []
    for place in range(end + 1):
        live = RESIDENT + sum(one.nbytes for one in lifetimes if one.saves[0] <= place < one.end_point)
        before = RESIDENT + sum(one.nbytes for one in lifetimes if one.saves[0] < place <= one.end_point)
        kind, lifetime = events[place] if place < end else (PointKind.END, None)
        saved_key = key(place) if kind is SAVE else None
        points.append(Point(kind, lifetime, saved_key, 100, live, max(before, live)))
    return Recording("cpu", "by hand", 1 << 40, "none", "virtual", RESIDENT, 0, tuple(points), tuple(lifetimes))


def one_forward_one_backward(micro_batches: int, sizes: list[int]) -> Recording:
    """A stage of a pipeline: two forward passes are in flight, with backward passes between them."""
    layers = len(sizes)
    events: list[tuple[PointKind, int]] = []
    for micro_batch in range(micro_batches + 1):
        if micro_batch < micro_batches:
            events += [(SAVE, micro_batch * layers + layer) for layer in range(layers)]
        if micro_batch:
            events += [(USE, (micro_batch - 1) * layers + layer) for layer in reversed(range(layers))]
    return step_of(events, sizes * micro_batches)


def absences_as_plan(recording: Recording, absences: list[AbsenceTuple], budget_bytes: int) -> list[int]:
    plan = plan_of(recording, gaps_of(recording), absences, "by hand", budget_bytes)
    return [mark.peak_bytes for mark in simulate(recording, plan, FAST).marks]


def test_what_is_given_up_at_a_use_is_given_up_before_it() -> None:
    recording = step_of([(SAVE, 0), (SAVE, 1), (USE, 0), (SAVE, 2), (USE, 2), (USE, 1)], [40, 30, 50])
    gaps = gaps_of(recording)
    (first,) = [place for place, gap in enumerate(gaps) if gap.lifetime == 0]
    (second,) = [place for place, gap in enumerate(gaps) if gap.lifetime == 1]
    # The first is absent from its save to its use, at point 2; the second is released there, to make room for the
    # third.
    absences = [(first, 0, -1), (second, 2, -1)]
    assert absences_as_plan(recording, absences, 0)[2] == RESIDENT + 40 + 30
    enough = release_before_uses(recording, gaps, absences, RESIDENT + 70)
    assert enough == absences
    less = release_before_uses(recording, gaps, absences, RESIDENT + 69)
    assert less == [(first, 0, -1), (second, 1, -1)]
    assert absences_as_plan(recording, less, 0)[2] == RESIDENT + 40


def test_what_cannot_be_given_up_before_a_use_stays_as_it_is() -> None:
    """The operation that saved it ends only at that use, so its copy cannot be issued earlier."""
    recording = step_of([(SAVE, 0), (SAVE, 1), (USE, 0), (SAVE, 2), (USE, 2), (USE, 1)], [40, 30, 50])
    late = replace(recording.lifetimes[1], copy_point=2, free_point=2)
    recording = replace(recording, lifetimes=(recording.lifetimes[0], late, recording.lifetimes[2]))
    gaps = gaps_of(recording)
    absences = [(place, gap.release_point, -1) for place, gap in enumerate(gaps) if gap.lifetime < 2]
    assert absences_as_plan(recording, absences, 0)[2] == RESIDENT + 40 + 30
    assert release_before_uses(recording, gaps, absences, RESIDENT) == absences


@given(recording=any_recording(), data=st.data())
def test_nothing_takes_more_anywhere_than_before(recording: Recording, data: st.DataObject) -> None:
    gaps = gaps_of(recording)
    absences = []
    for place, gap in enumerate(gaps):
        if data.draw(st.booleans()):
            release = data.draw(st.integers(gap.release_point, gap.last - 1))
            early = range(max(release + 1, gap.first), gap.use or 0)
            absences.append((place, release, data.draw(st.sampled_from([-1, *early]))))
    budget_bytes = data.draw(st.integers(RESIDENT, recording.peak_bytes))
    found = release_before_uses(recording, gaps, absences, budget_bytes)
    before, after = (absences_as_plan(recording, one, budget_bytes) for one in (absences, found))
    assert all(one <= other for one, other in zip(after, before, strict=True))
    for (gap, release, reload), (other, was, then) in zip(found, absences, strict=True):
        assert (gap, reload) == (other, then)
        assert gaps[gap].release_point <= release <= was


@pytest.mark.parametrize(("micro_batches", "sizes"), [(3, [6, 46]), (3, [53, 33, 35]), (4, [47, 37, 11])])
def test_a_stage_of_a_pipeline_is_planned_by_the_search_under_every_budget(
    micro_batches: int, sizes: list[int]
) -> None:
    recording = one_forward_one_backward(micro_batches, sizes)
    least, most = least_bytes(recording), recording.peak_bytes
    over = []
    for budget_bytes, link in itertools.product(range(least, most, 7), (FAST, LinkCosts(1e8, 1e8, 2e8, 0))):
        planned = plan_step(recording, link, budget_bytes, AutoOffload(0.001))
        if not planned.fits:
            over.append(budget_bytes)
    assert least < most
    assert over == []
