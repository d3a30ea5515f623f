"""The native core's recorded step equals that of recomputing.py and footprint.py in the reference, on any recording."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recomputable_recording, chain
from tests.planning.reference import footprint
from tests.planning.reference.recompute_choice import gaps_of_recomputed
from tests.planning.reference.recomputing import ordered_candidates, rewritten
from tests.planning.test_host_lane import hosts
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes, offload_everything, stored_bytes
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.planning.search.step_model import make_step_model
from vdnn.step.plan import Action
from vdnn.step.recording import Recording


@settings(max_examples=examples(400), deadline=None)
@given(recording=any_recomputable_recording(7), costs=LINKS, data=strategies.data())
def test_recomputes_make_the_step_that_the_reference_makes(
    recording: Recording, costs: LinkCosts, data: strategies.DataObject
) -> None:
    candidates = candidates_of(recording)
    chosen = data.draw(strategies.sets(strategies.sampled_from(candidates))) if candidates else set()
    followed = with_recomputes(recording, chosen)
    recomputed = recorded_step(recording).with_recomputes(sorted(chosen))
    assert recomputed.compute_ns == [point.compute_ns for point in followed.points]
    assert recomputed.step_ns == followed.compute_ns
    assert recomputed.peak_bytes == followed.peak_bytes
    assert recomputed.least_bytes == least_bytes(followed)
    gaps = gaps_of(followed)
    assert gaps_of_recomputed(recomputed) == gaps
    budget = data.draw(strategies.integers(recomputed.least_bytes - 5, followed.peak_bytes + 1))
    may_leave = bytes(data.draw(strategies.lists(strategies.integers(0, 1), min_size=len(gaps), max_size=len(gaps))))
    outcome = recomputed.model(make_link_model(costs)).evaluate(may_leave, budget)
    expected = make_step_model(followed, gaps, costs).evaluate(may_leave, budget)
    assert (outcome is None) is (expected is None)
    if outcome is not None and expected is not None:
        assert (outcome.step_ns, outcome.absences) == (expected.step_ns, expected.absences)


@settings(max_examples=examples(400), deadline=None)
@given(recording=any_recomputable_recording(7).flatmap(hosts), data=strategies.data())
def test_the_recording_of_a_step_with_recomputes_is_that_of_the_reference(
    recording: Recording, data: strategies.DataObject
) -> None:
    candidates = candidates_of(recording)
    assert candidates == ordered_candidates(recording, by_issue=False)
    assert recorded_step(recording).candidates(by_issue=True) == ordered_candidates(recording, by_issue=True)
    chosen = data.draw(strategies.sets(strategies.sampled_from(candidates))) if candidates else set()
    followed = with_recomputes(recording, chosen)
    assert followed == rewritten(recording, frozenset(chosen))
    # What the native core made is what it would read from the recording.
    read = type(recorded_step(followed))(followed)
    assert [one[1:] for one in read.points] == [one[1:] for one in recorded_step(followed).points]
    assert read.lifetimes == recorded_step(followed).lifetimes


@settings(max_examples=examples(300), deadline=None)
@given(recording=any_recomputable_recording(7), data=strategies.data())
def test_gaps_and_bytes_are_those_of_the_reference(recording: Recording, data: strategies.DataObject) -> None:
    assert gaps_of(recording) == footprint.gaps_of(recording)
    everything = offload_everything(recording)
    peaks = footprint.interval_bytes(recording, everything)
    assert recorded_step(recording).least_peaks == peaks
    planned = [data.draw(strategies.sampled_from([one, None])) for one in everything]
    lifetimes = [
        type(widest)(widest.nbytes, Action.KEEP) if one is None else one
        for one, widest in zip(planned, everything, strict=True)
    ]
    assert interval_bytes(recording, lifetimes) == footprint.interval_bytes(recording, lifetimes)
    for actions in ({Action.KEEP}, {Action.KEEP, Action.OFFLOAD}):
        expected = footprint.stored_bytes(recording, lifetimes, actions)
        assert stored_bytes(recording, lifetimes, actions) == expected


def test_a_recording_is_read_once_and_compares_as_before() -> None:
    recording, other = chain([10, 20]), chain([10, 20])
    assert recorded_step(recording) is recorded_step(recording)
    assert recording == other
    assert hash(recording) == hash(other)


def test_what_nobody_can_recompute_is_refused() -> None:
    step = recorded_step(chain([10, 20]))
    for chosen in ([0], [2], [-1]):
        for apply in (step.with_recomputes, step.recomputed):
            with pytest.raises(InvalidArgumentError, match="chosen"):
                apply(chosen)


def test_absences_of_another_step_are_refused() -> None:
    short, long = chain([10, 20]), chain([10, 20, 30])
    link = make_link_model(LinkCosts(1e9, 1e9, 2e9, 0))
    for ask in (
        lambda: recorded_step(short).interval_bytes(offload_everything(long)),
        lambda: recorded_step(short).simulate(offload_everything(long), link, 0),
        lambda: recorded_step(short).stored_bytes(offload_everything(long), [True, True]),
    ):
        with pytest.raises(InvalidArgumentError, match="absences"):
            ask()
    with pytest.raises(InvalidArgumentError, match="counts"):
        recorded_step(short).stored_bytes(offload_everything(short), [True])


def test_what_is_no_recording_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        type(recorded_step(chain([10])))(object())
