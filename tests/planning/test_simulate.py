"""The timeline of any plan, as the native core predicts it, equals that of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recomputable_recording, chain
from tests.planning.reference.timeline import timeline_of
from tests.planning.test_host_lane import hosts
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import offload_everything
from vdnn.planning.planned_step import plan_step
from vdnn.planning.recomputing import candidates_of, planned_recompute, with_recomputes
from vdnn.planning.simulate import simulate, simulate_followed
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Recording


@strategies.composite
def any_plan(draw: strategies.DrawFn, recording: Recording) -> Plan:
    """Any recomputes, and absences with any release and reload points that a plan may have."""
    candidates = candidates_of(recording)
    chosen = draw(strategies.sets(strategies.sampled_from(candidates))) if candidates else set()
    followed = with_recomputes(recording, chosen)
    end = len(followed.points) - 1
    lifetimes = []
    for index, lifetime in enumerate(followed.lifetimes):
        if index in chosen:
            lifetimes.append(planned_recompute(recording.lifetimes[index]))
            continue
        absences, first = [], lifetime.copy_point
        while first < end and draw(strategies.booleans()):
            release = draw(strategies.integers(first, end - 1))
            reload = draw(strategies.none() | strategies.integers(release + 1, end))
            absences.append(Absence(release, reload))
            first = release + 1 if reload is None else reload
        action = Action.OFFLOAD if absences else Action.KEEP
        lifetimes.append(PlannedLifetime(lifetime.nbytes, action, tuple(absences)))
    return make_plan(followed, "any", tuple(lifetimes))


@settings(max_examples=examples(600), deadline=None)
@given(
    recording=any_recomputable_recording(6).flatmap(hosts),
    costs=LINKS,
    issue_ns=strategies.sampled_from([0, 3, 40]),
    data=strategies.data(),
)
def test_any_plan_has_the_timeline_of_the_reference(
    recording: Recording, costs: LinkCosts, issue_ns: int, data: strategies.DataObject
) -> None:
    costs, plan = replace(costs, issue_ns=issue_ns), data.draw(any_plan(recording))
    assert simulate(recording, plan, costs) == timeline_of(recording, plan, costs)


@settings(max_examples=examples(100), deadline=None)
@given(recording=any_recomputable_recording(6), costs=LINKS)
def test_the_figures_of_a_simulated_step_are_those_of_its_timeline(recording: Recording, costs: LinkCosts) -> None:
    plan = make_plan(recording, "any", offload_everything(recording))
    simulated = simulate_followed(recording, plan, costs)
    timeline = simulated.timeline
    assert timeline is simulated.timeline, "it is made once"
    assert (simulated.step_ns, simulated.host_ns, simulated.peak_bytes, simulated.host_stall_ns) == (
        timeline.step_ns,
        timeline.host_ns,
        timeline.peak_bytes,
        timeline.host_stall_ns,
    )


def test_a_plan_for_another_step_is_refused() -> None:
    plan = plan_step(chain([10, 20, 30]), LinkCosts(1e9, 1e9, 2e9, 0), None).plan
    with pytest.raises(InvalidArgumentError, match="that 'auto' made for another step, of 7 points and 3 storages"):
        simulate(chain([10, 20]), plan, LinkCosts(1e9, 1e9, 2e9, 0))
