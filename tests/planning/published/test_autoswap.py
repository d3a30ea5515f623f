"""autoswap: its four scores, the selection at the peak, and the schedule of copies one by one."""

from __future__ import annotations

import dataclasses

from tests.planning.policies.steps import EVEN, absences_of, made_plan
from tests.planning.recordings import chain
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.gaps import Gap
from vdnn.planning.published.autoswap import AutoSwap, Score, area_of_absence, by_weight
from vdnn.planning.published.peak_picking import pick_at_peak
from vdnn.planning.simulate import simulate
from vdnn.step.recording import Recording


def gap(lifetime: int, nbytes: int, first: int, last: int) -> Gap:
    return Gap(lifetime, 0, nbytes, first - 1, last, first, last)


def picked(recording: Recording, score: Score, less: int) -> set[int]:
    return set(absences_of(made_plan(AutoSwap(score), recording, recording.peak_bytes - less)))


def test_area_of_absence_punishes_small_ones_that_do_not_pay() -> None:
    assert area_of_absence(30, 4) == 120
    assert area_of_absence(-30, 4) == -7.5
    assert area_of_absence(-30, 60) > area_of_absence(-30, 4)


def test_doa_takes_the_longest_and_aoa_the_largest_area() -> None:
    recording = chain([10, 500, 10, 10])
    assert picked(recording, Score.DOA, 5) == {0}
    assert picked(recording, Score.AOA, 5) == {1}


def test_weights_are_the_bytes_over_the_budget_along_the_gap() -> None:
    peaks = [0, 10, 10, 30, 12, 0]
    long, short = gap(0, 5, 1, 5), gap(1, 5, 3, 4)
    # The sums over a budget of 11 bytes: -1 - 1 + 19 + 1 - 11 = 7 along the long gap, 19 + 1 = 20 along the short one.
    assert list(by_weight([long, short], peaks, 11, is_taken_anew=False)) == [short, long]
    assert list(by_weight([long, short], peaks, 0, is_taken_anew=False)) == [long, short]


def test_swdoa_weighs_anew_after_every_pick() -> None:
    peaks = [20, 20, 30, 13, 13]
    left, left_too, right = gap(0, 15, 0, 2), gap(1, 15, 1, 2), gap(2, 15, 2, 4)
    # Over 10 bytes the sums are 40, 30 and 26. After the first pick, -5 and 5 remain along the second gap and 5, 3 and
    # 3 along the third: 0 and 11.
    assert order_of([left, left_too, right], peaks, 10, is_taken_anew=False) == [0, 1, 2]
    assert order_of([left, left_too, right], peaks, 10, is_taken_anew=True) == [0, 2, 1]


def order_of(gaps: list[Gap], peaks: list[int], budget_bytes: int, *, is_taken_anew: bool) -> list[int]:
    """The lifetimes in the order of picks."""
    left, order = list(peaks), []
    for one in by_weight(gaps, left, budget_bytes, is_taken_anew=is_taken_anew):
        order.append(one.lifetime)
        for interval in range(one.first, one.last + 1):
            left[interval] -= one.nbytes
    return order


def test_only_gaps_across_the_peak_are_candidates_until_the_peak_moves() -> None:
    points = [dataclasses.replace(chain([1]).points[0], peak_bytes=peak) for peak in (10, 50, 10, 40, 10)]
    recording = dataclasses.replace(chain([1]), points=tuple(points))
    across, beside = gap(0, 25, 1, 1), gap(1, 15, 2, 4)

    def ranked(candidates: object, _: object) -> object:
        asked.append(candidates)
        return iter(candidates)  # type: ignore[call-overload]

    asked: list[object] = []
    assert pick_at_peak(recording, [across, beside], 25, ranked) == [across, beside]  # type: ignore[arg-type]
    assert asked == [[across], [beside]]


def test_picking_ends_when_nothing_more_would_help() -> None:
    recording = chain([10])
    assert pick_at_peak(recording, [], 1, lambda candidates, _: iter(candidates)) == []


def test_copies_back_are_laid_one_by_one_from_the_end() -> None:
    recording = chain([1800, 1800, 10, 10, 10, 10])
    plan = made_plan(AutoSwap(Score.DOA, sticks_to_limit=False), recording, recording.peak_bytes - 1820)
    # The last is needed at point 11, at 12000, so its copy begins by 10200. The one needed at 11000 has to be complete
    # by then too, so its copy begins by 8400. Alone it would have begun by 9200, one point later.
    assert [absences_of(plan)[index][0].reload_point for index in (0, 1)] == [9, 7]


def test_without_the_limit_nobody_waits_for_copies_out() -> None:
    recording = chain([2800, 2800, 10, 10])
    budget = recording.peak_bytes - 2000
    sticking, free = AutoSwap(Score.AOA), AutoSwap(Score.AOA, sticks_to_limit=False)
    stuck, freed = made_plan(sticking, recording, budget), made_plan(free, recording, budget)
    assert simulate(recording, stuck, EVEN).release_stall_ns > 0
    assert max(interval_bytes(recording, stuck.lifetimes)) <= budget
    assert simulate(recording, freed, EVEN).release_stall_ns == 0
    assert max(interval_bytes(recording, freed.lifetimes)) > budget
