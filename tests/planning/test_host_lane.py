"""The host lane: a step takes at least as long as the host needs to issue it, and the search knows that."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recomputable_recording, any_recording, chain, recomputable
from tests.planning.reference.recompute_choice import gaps_of_recomputed
from vdnn.planning.bound.lower_bound import host_bound_ns
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.step_model import make_step_model, plan_of
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Action
from vdnn.step.recording import Point, PointKind, Recording
from vdnn.step.timeline import Timeline

INSTANT = LinkCosts(1e18, 1e18, 2e18, 0)


def issued(recording: Recording, issue_ns: int, recompute_ns: int = 0, *, synchronizes: bool = False) -> Recording:
    """The recording on a host that needs `issue_ns` for each interval and `recompute_ns` for each recompute."""
    return replace(
        recording,
        synchronizes=synchronizes,
        points=tuple(replace(point, issue_ns=issue_ns) for point in recording.points),
        lifetimes=tuple(
            one
            if one.recompute is None
            else replace(one, recompute=replace(one.recompute, issue_ns=recompute_ns, discard_issue_ns=recompute_ns))
            for one in recording.lifetimes
        ),
    )


@strategies.composite
def hosts(draw: strategies.DrawFn, recording: Recording) -> Recording:
    """The recording with a host that is slow at some points and fast at others."""
    drawn = issued(recording, 0, draw(strategies.integers(0, 90)), synchronizes=draw(strategies.booleans()))
    points = tuple(replace(point, issue_ns=draw(strategies.integers(0, 60))) for point in drawn.points)
    return replace(drawn, points=points)


@settings(max_examples=examples(300), deadline=None)
@given(
    recording=any_recording(6).flatmap(hosts), costs=LINKS, issue_ns=strategies.integers(0, 40), data=strategies.data()
)
def test_the_native_lane_takes_the_time_of_the_reference(
    recording: Recording, costs: LinkCosts, issue_ns: int, data: strategies.DataObject
) -> None:
    costs, gaps = replace(costs, issue_ns=issue_ns), gaps_of(recording)
    flags = data.draw(strategies.lists(strategies.booleans(), min_size=len(gaps), max_size=len(gaps)))
    outcome = make_step_model(recording, gaps, costs).evaluate(bytes(flags), least_bytes(recording) + 20)
    if outcome is None:
        return
    timeline = simulate(recording, plan_of(recording, gaps, outcome.absences, "any", None), costs)
    assert (outcome.step_ns, outcome.host_ns) == (timeline.step_ns, timeline.host_ns)
    assert timeline.step_ns >= recording.kept_ns


@settings(max_examples=examples(300), deadline=None)
@given(recording=any_recomputable_recording(6).flatmap(hosts), costs=LINKS, data=strategies.data())
def test_native_recomputes_have_the_issue_times_of_the_reference(
    recording: Recording, costs: LinkCosts, data: strategies.DataObject
) -> None:
    candidates = candidates_of(recording)
    chosen = data.draw(strategies.sets(strategies.sampled_from(candidates))) if candidates else set()
    followed = with_recomputes(recording, chosen)
    recomputed = recorded_step(recording).with_recomputes(sorted(chosen))
    assert recomputed.step_ns == followed.kept_ns
    everything = bytes([1] * len(gaps_of(followed)))
    outcome = recomputed.model(make_link_model(costs), 7).evaluate(everything, recomputed.least_bytes)
    expected = make_step_model(followed, gaps_of_recomputed(recomputed), replace(costs, issue_ns=7)).evaluate(
        everything, recomputed.least_bytes
    )
    assert outcome is not None
    assert expected is not None
    assert (outcome.step_ns, outcome.host_ns) == (expected.step_ns, expected.host_ns)


@settings(max_examples=examples(200), deadline=None)
@given(recording=any_recording(6).flatmap(hosts), costs=LINKS, budget=strategies.integers(0, 60))
def test_step_follows_step_as_fast_as_the_slower_of_device_and_host(
    recording: Recording, costs: LinkCosts, budget: int
) -> None:
    recording, costs, gaps = replace(recording, synchronizes=False), replace(costs, issue_ns=11), gaps_of(recording)
    outcome = make_step_model(recording, gaps, costs).evaluate(bytes([1] * len(gaps)), least_bytes(recording) + budget)
    assert outcome is not None
    plan = plan_of(recording, gaps, outcome.absences, "any", None)
    alone = simulate(recording.without_host(), plan, costs.without_host())
    timeline = simulate(recording, plan, costs)
    assert timeline.step_ns == max(alone.step_ns, timeline.host_ns)
    assert timeline.is_bound_by_host is (timeline.host_ns >= alone.step_ns and timeline.step_ns > 0)
    if timeline.host_ns <= alone.step_ns:
        assert (timeline.marks, timeline.copies) == (alone.marks, alone.copies), "the host is far enough ahead"


def _kept(recording: Recording, costs: LinkCosts = INSTANT) -> Timeline:
    return simulate(recording, plan_of(recording, (), (), "none", None), costs)


def test_a_host_that_is_slower_than_the_device_bounds_the_step_and_the_device_waits_for_it() -> None:
    recording = chain([10, 20], compute_ns=100)  # five intervals
    assert _kept(issued(recording, 99)).step_ns == 500
    assert _kept(issued(recording, 99)).host_stall_ns == 0
    slow = _kept(issued(recording, 130))
    assert (slow.step_ns, slow.host_ns, slow.is_bound_by_host) == (650, 650, True)
    assert slow.host_stall_ns == 150 == slow.step_ns - 500


def test_a_program_that_synchronizes_begins_each_step_with_the_host() -> None:
    """The host is slow in the first two intervals of five and fast in the others. Without waiting it is ahead."""
    recording = chain([10, 20], compute_ns=100)
    points = tuple(replace(point, issue_ns=180 if index < 2 else 10) for index, point in enumerate(recording.points))
    uneven = replace(recording, points=points)
    assert _kept(uneven).step_ns == 500
    waiting = _kept(replace(uneven, synchronizes=True))
    assert (waiting.step_ns, waiting.host_stall_ns) == (180 + 180 + 300, 160)


def test_a_copy_begins_when_the_host_has_issued_it() -> None:
    """At its point the device is done after 100 ns and so is the host, which needs 30 more for the copy."""
    recording = issued(chain([10, 20], compute_ns=100), 100, synchronizes=True)
    gaps = gaps_of(recording)
    costs = replace(INSTANT, issue_ns=30)
    absences = [(0, gaps[0].release_point, -1)]
    outcome = make_step_model(recording, gaps, costs).replay(absences)
    timeline = simulate(recording, plan_of(recording, gaps, absences, "any", None), costs)
    assert timeline.copies[0].begin_ns == 130
    assert timeline.step_ns == outcome.step_ns


def test_a_copy_takes_the_host_time_of_its_issue() -> None:
    recording = issued(chain([10, 20], compute_ns=100), 100)
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, replace(INSTANT, issue_ns=30))
    outcome = model.evaluate(bytes([1] * len(gaps)), least_bytes(recording))
    assert outcome is not None
    copies = 2 * len(outcome.absences)  # each storage is used once
    assert copies > 0
    assert outcome.step_ns == 500 + 30 * copies


@settings(max_examples=examples(60), deadline=None)
@given(
    recording=any_recomputable_recording(4).flatmap(hosts),
    costs=LINKS,
    factor=strategies.sampled_from([1, 2, 4]),
    data=strategies.data(),
)
def test_a_plan_with_the_lane_is_never_slower_than_one_without_and_never_faster_than_its_bound(
    recording: Recording, costs: LinkCosts, factor: int, data: strategies.DataObject
) -> None:
    costs, slow = replace(costs, issue_ns=9 * factor), recording.with_issue_times(factor)
    budget = data.draw(strategies.integers(least_bytes(recording), recording.peak_bytes))
    without = plan_step(recording.without_host(), costs.without_host(), budget)
    planned = plan_step(slow, costs, budget)
    assert planned.timeline.step_ns <= simulate(slow, without.plan, costs).step_ns
    if not slow.synchronizes and recording.peak_bytes > budget:
        assert planned.timeline.host_ns >= host_bound_ns(slow, gaps_of(slow), costs, budget)


def _with_cheap_recomputes(recompute_issue_ns: int) -> Recording:
    """Eight storages that are recomputed from a ninth at no cost for the device, on a link that is too slow."""
    recording = chain([10, *[100] * 8], compute_ns=1000)
    for index in range(1, 9):
        recording = recomputable(recording, index, (0,), compute_ns=1)
    return issued(recording, 900, recompute_issue_ns)


def test_a_slow_host_gets_fewer_recomputes() -> None:
    costs = LinkCosts(0.05e9, 0.05e9, 0.1e9, 0, issue_ns=10)

    def recomputes(issue_ns: int) -> int:
        recording = _with_cheap_recomputes(issue_ns)
        budget = least_bytes(recording) + 350
        return sum(one.is_recomputed for one in plan_step(recording, costs, budget).plan.lifetimes)

    assert recomputes(1) > recomputes(100_000) == 0


def test_the_search_asks_the_lane_only_where_the_host_bounds_the_step() -> None:
    """The plan is that for a host that takes no time, unless the host is slower than the device."""
    recording = issued(chain([10, 20, 30, 20, 10], compute_ns=100), 20)
    costs = LinkCosts(1e9, 1e9, 2e9, 0, issue_ns=1)
    budget = least_bytes(recording) + 5
    request = PlanRequest(recording, costs, budget)
    without = PlanRequest(recording.without_host(), costs.without_host(), budget)
    assert list(Auto().candidates(request)) == list(Auto().candidates(without))
    slow = request._replace(recording=issued(recording, 1000))
    assert len(list(Auto().candidates(slow))) > len(list(Auto().candidates(without)))


def test_a_small_copy_is_left_out_where_the_host_bounds_the_step() -> None:
    """One large storage frees as much as five small ones, with a fifth of the copies."""
    recording = issued(chain([100, 20, 20, 20, 20, 20, 5], compute_ns=100), 200)
    budget = recording.peak_bytes - 95
    planned = plan_step(recording, replace(INSTANT, issue_ns=50), budget)
    offloaded = [one.nbytes for one in planned.plan.lifetimes if one.action is Action.OFFLOAD]
    assert offloaded == [100]
    assert planned.timeline.host_ns == 15 * 200 + 2 * 50
    bound_ns = host_bound_ns(recording, gaps_of(recording), replace(INSTANT, issue_ns=50), budget)
    assert bound_ns == 15 * 200 + 95  # two copies, of which 95 bytes of 100 need their part


def test_recordings_keep_issue_times_and_older_files_have_none(tmp_path) -> None:  # type: ignore[no-untyped-def]
    recording = issued(recomputable(chain([10, 20]), 1, (0,), 5), 7, 3, synchronizes=True)
    recording.save(tmp_path / "step.json")
    assert Recording.load(tmp_path / "step.json") == recording
    text = (tmp_path / "step.json").read_text()
    for field in ('"issue_ns":7', '"issue_ns":3', '"discard_issue_ns":3', '"synchronizes":true'):
        assert field in text
        text = text.replace("," + field, "").replace(field + ",", "")
    (tmp_path / "older.json").write_text(text)
    older = Recording.load(tmp_path / "older.json")
    assert older == replace(recording.without_host(), synchronizes=False)
    assert not older.has_host


def test_a_point_without_issue_time_is_as_before() -> None:
    assert Point(PointKind.END, None, None, 1, 2, 3).issue_ns == 0
    assert dataclasses.fields(Point)[-1].name == "issue_ns"
