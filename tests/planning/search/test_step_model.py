"""The native model of a step gives the same answers as schedule.py and timeline.py, on any recording."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recording, chain
from tests.planning.reference.schedule import schedule
from tests.planning.reference.timeline import timeline_of
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.planning.search.step_model import (
    absences_by_gap,
    make_step_model,
    plan_of,
    tuples_of_plan,
)
from vdnn.step.recording import Recording


@settings(max_examples=examples(400), deadline=None)
@given(recording=any_recording(7), costs=LINKS, data=strategies.data())
def test_schedule_and_time_are_those_of_the_reference(
    recording: Recording, costs: LinkCosts, data: strategies.DataObject
) -> None:
    gaps = gaps_of(recording)
    flags = data.draw(strategies.lists(strategies.booleans(), min_size=len(gaps), max_size=len(gaps)))
    least = least_bytes(recording)
    budget = data.draw(strategies.integers(least - 5, recording.peak_bytes + 1))
    interval = data.draw(strategies.integers(0, len(recording.points) - 1))
    more = data.draw(strategies.sampled_from([{}, {interval: 30}]))
    in_order, furthest_first = data.draw(strategies.booleans()), data.draw(strategies.booleans())
    model = make_step_model(recording, gaps, costs)
    expected = schedule(recording, gaps, flags, budget, more, in_order=in_order, furthest_first=furthest_first)
    outcome = model.evaluate(bytes(flags), budget, list(more.items()), in_order, furthest_first)
    assert (outcome is None) is (expected is None)
    if outcome is None or expected is None:
        return
    assert absences_by_gap(gaps, outcome.absences) == expected
    plan = plan_of(recording, gaps, outcome.absences, "any", budget)
    assert model.peak_bytes(outcome.absences) == max(interval_bytes(recording, plan.lifetimes)) <= budget
    timeline = timeline_of(recording, plan, costs)
    assert outcome.step_ns == timeline.step_ns
    assert sum(stall[2] for stall in outcome.stalls) == timeline.stall_ns
    assert sorted(tuples_of_plan(gaps, plan)) == sorted(outcome.absences)


@settings(max_examples=examples(200), deadline=None)
@given(recording=any_recording(5), costs=LINKS, data=strategies.data())
def test_any_plan_takes_the_time_that_the_reference_says(
    recording: Recording, costs: LinkCosts, data: strategies.DataObject
) -> None:
    gaps = gaps_of(recording)
    absences = []
    for place, gap in enumerate(gaps):
        release = data.draw(strategies.integers(gap.release_point, gap.last - 1))
        back = data.draw(strategies.integers(max(release + 1, gap.first), gap.last))
        if data.draw(strategies.booleans()):
            absences.append((place, release, -1 if gap.use is None or back >= gap.use else back))
    plan = plan_of(recording, gaps, absences, "any", None)
    model = make_step_model(recording, gaps, costs)
    outcome = model.replay(absences)
    assert outcome.step_ns == timeline_of(recording, plan, costs).step_ns
    step = recorded_step(recording).with_recomputes([])
    assert step.shortest_ns(make_link_model(costs), model.peak_bytes(absences)) <= outcome.step_ns


def test_a_step_takes_at_least_what_its_copies_take_around_the_peak() -> None:
    """The peak is in the interval that the first use ends."""
    recording = chain([400, 100, 100], compute_ns=50)
    step = recorded_step(recording).with_recomputes([])
    link = make_link_model(LinkCosts(2e9, 1e9, 3e9, 7))
    peak = recording.peak_bytes
    assert step.shortest_ns(link, peak) == recording.compute_ns == 7 * 50, "nothing moves"
    # The first save, 300 bytes to the host at 2 bytes a nanosecond, the interval, and 300 bytes back.
    assert step.shortest_ns(link, peak - 300) == 50 + 150 + 50 + 300
    # Both saves before the interval, of which one hides a copy of 100 bytes, the interval, and 100 bytes back in time.
    assert step.shortest_ns(link, peak - 100) == 3 * 50 + 50 + 3 * 50


def test_nonsense_is_refused() -> None:
    recording = chain([10, 20, 30])
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, LinkCosts(1e9, 1e9, 2e9, 0))
    with pytest.raises(InvalidArgumentError, match="may_leave"):
        model.evaluate(b"\x01", 100)
    with pytest.raises(InvalidArgumentError, match="more_room"):
        model.evaluate(bytes(len(gaps)), 1 << 30, [(1000, 1)])
    for absence in ((len(gaps), 0, -1), (-1, 0, -1), (0, 1000, -1), (0, 0, 1000)):
        with pytest.raises(InvalidArgumentError, match="absences"):
            model.replay([absence])
        with pytest.raises(InvalidArgumentError, match="absences"):
            model.peak_bytes([absence])
