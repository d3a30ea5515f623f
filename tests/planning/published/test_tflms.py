"""tflms: the effect of its three numbers, and the search for the largest ones under which the step fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from tests.planning.policies.steps import absences_of, made_plan, used_twice, with_compute, with_lifetimes
from tests.planning.recordings import RESIDENT, chain
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.published.tflms import Tflms, Thresholds
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

# In a chain of four, every point is its own level: saves at 0 to 3 and uses at 4 (of 3) to 7 (of 0) give distances of
# 7, 5, 3 and 1 levels.
FOUR = (10, 20, 30, 40)


def under(recording: Recording, thresholds: Thresholds) -> dict[int, tuple[Absence, ...]]:
    return absences_of(made_plan(Tflms(thresholds), recording))


def peak(recording: Recording, planner: Tflms, budget_bytes: int) -> int:
    return max(interval_bytes(recording, made_plan(planner, recording, budget_bytes).lifetimes))


@pytest.mark.parametrize(("threshold", "left"), [(2, {0, 1, 2}), (3, {0, 1}), (4, {0, 1}), (5, {0}), (7, set())])
def test_only_what_is_used_further_off_than_the_threshold_leaves(threshold: int, left: set[int]) -> None:
    assert set(under(chain(FOUR), Thresholds(threshold))) == left


def test_it_goes_a_level_after_it_was_made_and_comes_back_so_many_ahead() -> None:
    assert under(chain(FOUR), Thresholds(5, ahead=1)) == {0: (Absence(1, 6),)}
    assert under(chain(FOUR), Thresholds(5, ahead=3)) == {0: (Absence(1, 4),)}


def test_it_never_comes_back_before_it_has_gone() -> None:
    assert under(chain(FOUR), Thresholds(5, ahead=8)) == {0: (Absence(1, 2),)}


def test_waiting_gives_it_up_at_once_and_brings_it_back_at_its_use() -> None:
    assert under(chain(FOUR), Thresholds(5, waits_out=True)) == {0: (Absence(0, 6),)}
    assert under(chain(FOUR), Thresholds(5, waits_back=True)) == {0: (Absence(1),)}


def test_points_at_which_nothing_was_computed_are_no_levels() -> None:
    recording = with_compute(chain(FOUR), {1: 0, 2: 0})
    assert set(under(recording, Thresholds(4))) == {0}  # now five levels from its use; 1 and 2 have two fewer


def test_requests_of_one_operation_are_one_level() -> None:
    recording = with_lifetimes(chain(FOUR), {1: {"read": (8,)}})  # the operation asks at 6 and at 7
    assert set(under(recording, Thresholds(5))) == {0}
    assert set(under(recording, Thresholds(6))) == set()


def test_near_uses_are_served_from_the_device() -> None:
    recording = used_twice(FOUR)  # its uses are at 4 and at 8
    assert under(recording, Thresholds(4))[0] == (Absence(4, 7),)


def test_far_uses_have_a_copy_each_unless_they_are_near_each_other() -> None:
    recording = used_twice(FOUR)
    assert under(recording, Thresholds(3, groupby=0))[0] == (Absence(1, 3), Absence(4, 7))
    assert under(recording, Thresholds(3, groupby=3))[0] == (Absence(1, 3), Absence(4, 7))
    assert under(recording, Thresholds(3, groupby=4))[0] == (Absence(1, 3),)


def test_between_two_groups_it_goes_behind_the_last_use_of_the_first() -> None:
    # Used at 6, 7 and 11, all beyond any threshold here: one copy serves the first two uses and one the last.
    recording = used_again(chain([10] * 6), {6: 0, 7: 0})
    assert under(recording, Thresholds(5, groupby=1))[0] == (Absence(1, 5), Absence(7, 10))


def used_again(recording: Recording, lifetimes: Mapping[int, int]) -> Recording:
    """The recording with these uses given to other lifetimes. `lifetimes` maps each use to its new lifetime."""
    points = list(recording.points)
    for use, lifetime in lifetimes.items():
        before = points[use].lifetime
        assert before is not None, "a use"
        uses = (*recording.lifetimes[lifetime].uses, use)
        recording = with_lifetimes(
            recording,
            {
                before: {"uses": (), "read": ()},
                lifetime: {"uses": tuple(sorted(uses)), "read": tuple(one + 1 for one in sorted(uses))},
            },
        )
        points[use] = dataclasses.replace(points[use], lifetime=lifetime)
    return dataclasses.replace(recording, points=tuple(points))


@pytest.mark.slow
def test_it_finds_the_largest_threshold_and_then_the_largest_lead() -> None:
    recording = chain([10, 20, 30, 40, 30, 20, 10])
    levels = len(recording.points)
    tried = 0
    for budget in range(least_bytes(recording), recording.peak_bytes, 3):
        fitting = [
            Thresholds(threshold, ahead, levels)
            for threshold in range(1, levels + 1)
            for ahead in range(1, levels + 1)
            if peak(recording, Tflms(Thresholds(threshold, ahead, levels)), budget) <= budget
        ]
        if not any(one.ahead == 1 for one in fitting):
            continue
        tried += 1
        threshold = max(one.threshold for one in fitting if one.ahead == 1)
        ahead = max(one.ahead for one in fitting if one.threshold == threshold)
        assert absences_of(made_plan("tflms", recording, budget)) == under(
            recording, Thresholds(threshold, ahead, levels)
        )
    assert tried > 6


def test_all_uses_share_a_copy_back_if_there_is_room() -> None:
    recording = used_twice([10, 20, 30, 40, 10, 10])
    roomy = absences_of(made_plan("tflms", recording, recording.peak_bytes - 1))
    tight = absences_of(made_plan("tflms", recording, least_bytes(recording)))
    assert len(roomy.get(0, ())) <= 1
    assert len(tight[0]) == 2


def test_copies_are_waited_for_only_where_no_threshold_will_do() -> None:
    # The second is saved on the level of the first, so without waiting three are on the device one level later.
    recording = with_compute(chain([40, 40, 40, 40]), {1: 0})
    least = least_bytes(recording)
    not_waiting, out, both = Thresholds(), Thresholds(waits_out=True), Thresholds(waits_out=True, waits_back=True)
    peaks = [peak(recording, Tflms(one), least) for one in (not_waiting, out, both)]
    assert peaks == [RESIDENT + 120, RESIDENT + 80, least]
    found = [absences_of(made_plan("tflms", recording, budget))[0] for budget in peaks]
    assert [one[0].release_point for one in found] == [2, 0, 0]
    assert [one[0].reload_point is None for one in found] == [False, False, True]
