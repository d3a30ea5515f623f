"""capuchin: free time selects storages, in-triggers set their reloads, and stalls move the triggers."""

from __future__ import annotations

from tests.planning.policies.steps import EVEN, absences_of, made_plan, used_twice, with_lifetimes
from tests.planning.recordings import chain
from vdnn.planning.gaps import gaps_of
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.published.capuchin import Capuchin
from vdnn.planning.published.peak_picking import free_ns
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

# A chain of four has saves at 0 to 3 and uses at 4 (of 3) to 7 (of 0). Point p is reached at (p + 1) * 1000 ns.


def test_free_time_is_what_both_copies_leave_of_the_gap() -> None:
    recording = chain([100, 200, 300, 400])
    clock = StepClock(recording, EVEN)
    assert [free_ns(clock, gap) for gap in gaps_of(recording)] == [6800, 4600, 2400, 200]


def test_free_time_may_be_negative() -> None:
    recording = chain([100, 200, 300, 600])
    assert free_ns(StepClock(recording, EVEN), gaps_of(recording)[3]) == -200


def test_what_is_on_the_host_already_needs_no_copy_out() -> None:
    recording = used_twice([1200, 200])  # saves at 0 and 1, uses at 2 (of 0), 3 (of 1) and 4 (of 0)
    first, again = [gap for gap in gaps_of(recording) if gap.lifetime == 0]
    clock = StepClock(recording, EVEN)
    assert free_ns(clock, first) == 2000 - 1200 - 1200
    assert free_ns(clock, again) == 1000 - 1200  # released after it is read at 3


def test_the_most_free_time_leaves_first_whatever_the_size() -> None:
    recording = chain([10, 500, 10, 10])
    assert set(absences_of(made_plan("capuchin", recording, recording.peak_bytes - 5))) == {0}
    # A long copy reduces the free time: 9999 bytes leave none.
    slow = chain([9999, 500, 10, 10])
    assert set(absences_of(made_plan("capuchin", slow, slow.peak_bytes - 5))) == {1}


def test_only_what_is_away_across_the_peak_is_looked_at() -> None:
    # The last is used before it could lower any peak, and has the least free time of all; the others suffice.
    recording = chain([10, 10, 10, 10])
    assert set(absences_of(made_plan("capuchin", recording, recording.peak_bytes - 25))) == {0, 1, 2}


def with_a_peak(nbytes: int) -> Recording:
    """Saves are at 0 to 4, uses at 5 to 9. All are on the device before points 4, 5 and 6. Only the first and the last
    can be offloaded."""
    return with_lifetimes(chain([nbytes, 10, 10, 10, 4000]), {index: {"free_point": 9 - index} for index in (1, 2, 3)})


def test_the_in_trigger_is_the_last_access_that_is_early_enough() -> None:
    recording = with_a_peak(1500)
    (absence,) = absences_of(made_plan("capuchin", recording, recording.peak_bytes - 1000))[0]
    # The copy is complete at 2500. The reload is needed at 10000, so it starts by 8500: point 7 is reached at 8000, and
    # point 8 would be late.
    assert absence == Absence(2, 7)


def test_the_trigger_waits_for_room() -> None:
    recording = with_a_peak(3500)
    (absence,) = absences_of(made_plan("capuchin", recording, recording.peak_bytes - 3000))[0]
    # Its copy is complete at 4500, and its reload should start at 6500, from point 5: both are within the peak.
    assert absence == Absence(3, 6)


def test_what_is_late_gets_an_earlier_trigger() -> None:
    # Both reloads should start at about the same time, so the second is late at first.
    recording = chain([1800, 1800, 10, 10, 10, 10, 4000])
    recording = with_lifetimes(recording, {index: {"free_point": 13 - index} for index in (2, 3, 4, 5)})  # kept
    budget = recording.peak_bytes - 3240
    taught = made_plan(Capuchin(), recording, budget)
    untaught = made_plan(Capuchin(feedback_steps=0), recording, budget)
    assert simulate(recording, untaught, EVEN).reload_stall_ns > 0
    assert simulate(recording, taught, EVEN).reload_stall_ns < simulate(recording, untaught, EVEN).reload_stall_ns
    reload_points = [one[0].reload_point for one in (absences_of(taught)[0], absences_of(untaught)[0])]
    assert reload_points == sorted(reload_points, key=lambda point: point or 99)
    assert reload_points[0] != reload_points[1]
