"""The native core's step with recomputes equals that of recomputing.py and gaps.py, on any recording."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recomputable_recording, chain
from tests.planning.reference.recompute_choice import gaps_of_recomputed
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.planning.search.step_model import make_link_model, make_recorded_step, make_step_model
from vdnn.step.recording import Recording


@settings(max_examples=examples(400), deadline=None)
@given(recording=any_recomputable_recording(7), costs=LINKS, data=strategies.data())
def test_recomputes_make_the_step_that_the_reference_makes(
    recording: Recording, costs: LinkCosts, data: strategies.DataObject
) -> None:
    candidates = candidates_of(recording)
    chosen = data.draw(strategies.sets(strategies.sampled_from(candidates))) if candidates else set()
    followed = with_recomputes(recording, chosen)
    recomputed = make_recorded_step(recording).with_recomputes(sorted(chosen))
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


def test_what_nobody_can_recompute_is_refused() -> None:
    step = make_recorded_step(chain([10, 20]))
    for chosen in ([0], [2], [-1]):
        with pytest.raises(InvalidArgumentError, match="chosen"):
            step.with_recomputes(chosen)
