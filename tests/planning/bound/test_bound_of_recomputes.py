"""The lower bound of steps with rebuilds: what they read has to be there, and no plan is below it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, Phase, assume, given, settings

from tests.planning.recordings import LINKS, RESIDENT, any_rebuildable_recording, chain, rebuildable
from tests.planning.reference.exhaustive import count_of_plans
from tests.planning.test_recomputing import shortest
from vdnn.planning.bound.lower_bound import lower_bound
from vdnn.planning.costs import LinkCosts
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recomputing import candidates_of, with_rebuilds
from vdnn.step.recording import Recording

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # a byte takes a nanosecond


def altered(recording: Recording, point: int, compute_ns: int = 0, more_bytes: int = 0) -> Recording:
    points = list(recording.points)
    old = points[point]
    points[point] = replace(old, compute_ns=compute_ns, peak_bytes=old.peak_bytes + more_bytes)
    return replace(recording, points=tuple(points))


def test_what_a_rebuild_reads_has_to_be_back_by_then() -> None:
    """The second is rebuilt from the first, which has to go, and whose own use is a thousand later: in that time its
    copy back could hide, were it not for the rebuild."""
    recording = altered(rebuildable(chain([100, 100, 200], compute_ns=0), 1, (0,), compute_ns=1), 5, compute_ns=1000)
    budget = RESIDENT + 200
    copied_out, copied_back, rebuilt = 100, 100, 1
    best = shortest(recording, EVEN, budget)
    assert best == 1000 + copied_out + copied_back + rebuilt
    assert 1000 + copied_out + copied_back - 1 <= lower_bound(recording, EVEN, budget).step_ns <= best


def test_what_was_rebuilt_for_another_is_there_from_then_on() -> None:
    """The third is rebuilt from the second, which would then be there when there is no room for it yet: so one of them
    is moved, though rebuilding both would take two ns."""
    both = rebuildable(rebuildable(chain([10, 100, 100], compute_ns=0), 1, (0,), compute_ns=1), 2, (1,), compute_ns=1)
    recording = altered(altered(both, 3, more_bytes=200), 4, more_bytes=100)
    budget = RESIDENT + 210
    best = shortest(recording, EVEN, budget)
    copied_out, copied_back, rebuilt = 100, 100, 1
    assert best == copied_out + copied_back + rebuilt
    assert 100 <= lower_bound(recording, EVEN, budget).step_ns <= best


def test_what_is_read_by_a_rebuild_alone_is_copied_back_once() -> None:
    """The first is not used but for the second to be made from it. Once it is back it stays, and a copy back is due no
    more, though at all later points it may have been given up before. There was a bound of 749 here."""
    recording = rebuildable(chain([200, 200, 200, 100], compute_ns=50), 1, (0,), compute_ns=1)
    points, lifetimes = list(recording.points), list(recording.lifetimes)
    points[7] = replace(points[7], lifetime=None)
    lifetimes[0] = replace(lifetimes[0], uses=(), read=())
    recording = replace(recording, points=tuple(points), lifetimes=tuple(lifetimes))
    budget = RESIDENT + 450
    found = shortest(recording, EVEN, budget)
    assert lower_bound(recording, EVEN, budget).step_ns <= found <= 701


def test_what_there_is_no_room_to_rebuild_is_moved() -> None:
    """While the second is made it takes a thousand bytes more than there are: so one of those that are saved before the
    last is moved, though there is nothing that hides its copies."""
    recording = rebuildable(chain([100, 100, 100], compute_ns=0), 1, (0,), compute_ns=1, extra=1000)
    budget = RESIDENT + 200
    best = shortest(recording, EVEN, budget)
    copied_out, copied_back = 100, 100
    assert copied_out + copied_back - 1 <= lower_bound(recording, EVEN, budget).step_ns <= best


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(recording=any_rebuildable_recording(4), costs=LINKS)
def test_no_plan_is_below_it(recording: Recording, costs: LinkCosts) -> None:
    """Of all rebuilds and moves there are, where some rebuild reads something."""
    candidates = candidates_of(recording)
    assume(any((rebuild := recording.lifetimes[one].rebuild) and rebuild.inputs for one in candidates))
    assume(count_of_plans(with_rebuilds(recording, candidates)) * 2 ** len(candidates) <= 1500)
    assume(count_of_plans(recording) <= 600)
    least, most = least_bytes(recording), recording.peak_bytes
    assume(least < most)
    for budget in {least, (least + most) // 2}:
        assert lower_bound(recording, costs, budget).step_ns <= shortest(recording, costs, budget)
