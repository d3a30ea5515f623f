"""The lower bound of steps with recomputes: their inputs must be on the device, and no plan is below the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume

from tests.drawn import for_examples, quick_and_full
from tests.planning.recordings import LINKS, RESIDENT, any_recomputable_recording, chain, recomputable
from tests.planning.reference.exhaustive import count_of_plans
from tests.planning.test_recomputing import shortest
from vdnn.planning.bound.lower_bound import lower_bound
from vdnn.planning.bound.stall_program import StallProgram
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.step.recording import Recording

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # one nanosecond for each byte


def altered(recording: Recording, point: int, compute_ns: int = 0, more_bytes: int = 0) -> Recording:
    points = list(recording.points)
    old = points[point]
    points[point] = replace(old, compute_ns=compute_ns, peak_bytes=old.peak_bytes + more_bytes)
    return replace(recording, points=tuple(points))


def test_what_a_recompute_reads_has_to_be_back_by_then() -> None:
    """The second storage is recomputed from the first, which has to be offloaded. The use of the first is 1000 ns
    later: its reload could overlap with that time, but the recompute needs it earlier."""
    recording = altered(recomputable(chain([100, 100, 200], compute_ns=0), 1, (0,), compute_ns=1), 5, compute_ns=1000)
    budget = RESIDENT + 200
    copied_out, copied_back, recomputed = 100, 100, 1
    best = shortest(recording, EVEN, budget)
    assert best == 1000 + copied_out + copied_back + recomputed
    assert 1000 + copied_out + copied_back - 1 <= lower_bound(recording, EVEN, budget).step_ns <= best


def test_what_a_chain_of_recomputes_reads_is_due_at_its_first_recompute() -> None:
    """The third storage is recomputed from the second and that from the first, which has to be offloaded. Both are
    recomputed for the use of the third: the 1000 ns before the second's own use are too late for the reload."""
    both = recomputable(chain([100, 100, 100, 200], compute_ns=0), 1, (0,), compute_ns=1)
    recording = altered(recomputable(both, 2, (1,), compute_ns=1), 6, compute_ns=1000)
    budget = RESIDENT + 200
    best = shortest(recording, EVEN, budget)
    copied_out, recomputed = 200, 1
    assert best == 1000 + copied_out + 100 + recomputed
    assert best - 1 <= lower_bound(recording, EVEN, budget).step_ns <= best


def test_what_was_recomputed_for_another_is_there_from_then_on() -> None:
    """The third storage is recomputed from the second, which would then be on the device before there is room for it.
    So one of them is offloaded, although recomputing both would take two ns."""
    both = recomputable(recomputable(chain([10, 100, 100], compute_ns=0), 1, (0,), compute_ns=1), 2, (1,), compute_ns=1)
    recording = altered(altered(both, 3, more_bytes=200), 4, more_bytes=100)
    budget = RESIDENT + 210
    best = shortest(recording, EVEN, budget)
    copied_out, copied_back, recomputed = 100, 100, 1
    assert best == copied_out + copied_back + recomputed
    assert 100 <= lower_bound(recording, EVEN, budget).step_ns <= best


def test_what_is_read_by_a_recompute_alone_is_copied_back_once() -> None:
    """The first storage is used only by the recompute of the second. Once reloaded it stays, and no other reload is
    needed, although it could be released before all later points. The bound was once 749, which is too high."""
    recording = recomputable(chain([200, 200, 200, 100], compute_ns=50), 1, (0,), compute_ns=1)
    points, lifetimes = list(recording.points), list(recording.lifetimes)
    points[7] = replace(points[7], lifetime=None)
    lifetimes[0] = replace(lifetimes[0], uses=(), read=())
    recording = replace(recording, points=tuple(points), lifetimes=tuple(lifetimes))
    budget = RESIDENT + 450
    found = shortest(recording, EVEN, budget)
    assert lower_bound(recording, EVEN, budget).step_ns <= found <= 701


def test_what_there_is_no_room_to_recompute_is_moved() -> None:
    """The recompute of the second storage needs a thousand bytes more than the budget. So one of the storages that are
    saved before the last is offloaded, although its copies overlap with nothing."""
    recording = recomputable(chain([100, 100, 100], compute_ns=0), 1, (0,), compute_ns=1, extra=1000)
    budget = RESIDENT + 200
    best = shortest(recording, EVEN, budget)
    copied_out, copied_back = 100, 100
    assert copied_out + copied_back - 1 <= lower_bound(recording, EVEN, budget).step_ns <= best


@pytest.mark.slow
@quick_and_full("examples", 10, 60)
def test_no_plan_is_below_it(examples: int) -> None:
    for_examples(examples, assert_no_plan_is_below_it, recording=any_recomputable_recording(4), costs=LINKS)


def assert_no_plan_is_below_it(recording: Recording, costs: LinkCosts) -> None:
    """No choice of recomputes and moves has a step below the bound. Some recomputes have inputs."""
    candidates = candidates_of(recording)
    assume(any((recompute := recording.lifetimes[one].recompute) and recompute.inputs for one in candidates))
    assume(count_of_plans(with_recomputes(recording, candidates)) * 2 ** len(candidates) <= 1500)
    assume(count_of_plans(recording) <= 600)
    least, most = least_bytes(recording), recording.peak_bytes
    assume(least < most)
    for budget in {least, (least + most) // 2}:
        best = shortest(recording, costs, budget)
        assert lower_bound(recording, costs, budget).step_ns <= best
        third = StallProgram(recording, gaps_of(recording), costs, budget, 50, is_whole=False)
        assert recording.compute_ns + third.solve_with_whole_recomputes() <= best
