"""capuchin-full: hidden swaps first, then memory saved per second."""

from __future__ import annotations

import pytest

from tests.planning.policies.steps import EVEN, absences_of, made_plan
from tests.planning.published.recomputed_chains import RESIDENT, recomputed, recomputed_chain
from tests.planning.recordings import recomputable
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.policies import PlanRequest
from vdnn.planning.published.capuchin_full import to_recompute
from vdnn.planning.recomputing import recording_under
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording

# A chain of four of 2000 bytes has saves at 0 to 3 and uses at 4 (of 3) to 7 (of 0). Point p is reached at (p + 1) *
# 1000 ns, and the first peak is the interval before point 3. A copy takes 2000 ns, so only that of the first storage is
# complete by then.


def four(*costs_ns: int) -> Recording:
    return recomputed_chain([2000] * 4, costs_ns)


def peak_bytes(recording: Recording, plan: Plan) -> int:
    return max(interval_bytes(recording_under(recording, plan.lifetimes), plan.lifetimes))


def test_what_is_hidden_is_swapped_and_nothing_recomputed() -> None:
    recording = four(50, 30, 20)
    plan = made_plan("capuchin-full", recording, recording.peak_bytes - 2000)
    assert set(absences_of(plan)) == {0}
    assert not recomputed(plan)


def test_then_the_most_memory_per_second_is_recomputed() -> None:
    recording = four(50, 30, 20)
    plan = made_plan("capuchin-full", recording, recording.peak_bytes - 4000)
    assert set(absences_of(plan)) == {0}
    assert recomputed(plan) == {2}
    assert peak_bytes(recording, plan) <= recording.peak_bytes - 4000


@pytest.mark.parametrize(("cost_ns", "is_recomputed"), [(4000, True), (4001, False)])
def test_a_recompute_that_takes_longer_than_its_copies_is_swapped(cost_ns: int, *, is_recomputed: bool) -> None:
    recording = four(cost_ns, 9000, 9000)
    request = PlanRequest(recording, EVEN, recording.peak_bytes - 4000)
    chosen = to_recompute(request, recording.peak_bytes - 4000)
    assert (chosen == [1]) is is_recomputed


def test_a_chain_is_weighed_with_what_it_brings() -> None:
    """The second storage is chosen first. The third is recomputed from it, and then costs more than the fourth."""
    chained = recomputed_chain([2000] * 6, [10, 11, 0, 0, 0], compute_ns=500)
    chained = recomputable(chained, 3, (0,), 15)
    budget = chained.peak_bytes - 3 * 2000
    request = PlanRequest(chained, EVEN, budget)
    assert to_recompute(request, budget)[:2] == [1, 3]
    apart = recomputable(chained, 2, (0,), 11)
    assert to_recompute(request._replace(recording=apart), budget)[:2] == [1, 2]


def test_what_does_not_fit_with_its_recomputes_is_swapped() -> None:
    """If each storage were recomputed from the one before, all would be on the device at once."""
    recording = four(50, 30, 20)
    least = RESIDENT + 2 * 2000
    plan = made_plan("capuchin-full", recording, least)
    assert peak_bytes(recording, plan) <= least


def test_it_is_faster_than_swapping_alone_where_the_link_is_short() -> None:
    recording = recomputed_chain([2000] * 8, [40] * 7)
    budget = recording.peak_bytes - 9000
    full, swapped = (made_plan(name, recording, budget) for name in ("capuchin-full", "capuchin"))
    assert simulate(recording, full, EVEN).step_ns < simulate(recording, swapped, EVEN).step_ns
