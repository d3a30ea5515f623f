"""chen-recursive: cuts the largest segment in two, repeatedly."""

from __future__ import annotations

import itertools

from tests.planning.policies.steps import made_plan
from tests.planning.published.recomputed_chains import RESIDENT, recomputed, recomputed_chain, recomputed_peak_bytes
from tests.planning.recordings import recomputable
from vdnn.planning.published.chen_recursive import cuts_in_two
from vdnn.planning.published.recomputed_steps import RecomputedSteps
from vdnn.planning.published.save_blocks import SaveBlocks
from vdnn.step.recording import Recording

EIGHT = recomputed_chain([10] * 8, [5] * 7)


def blocks_of(recording: Recording) -> SaveBlocks:
    return SaveBlocks(RecomputedSteps(recording))


def test_each_cut_halves_the_largest_segment() -> None:
    first = list(itertools.islice(cuts_in_two(blocks_of(EIGHT)), 5))
    assert first == [set(), {3}, {1, 3}, {1, 3, 5}, {0, 1, 3, 5}]


def test_halves_are_of_bytes() -> None:
    uneven = recomputed_chain([70, 10, 10, 10, 10, 10, 10, 10], [5] * 7)
    assert list(itertools.islice(cuts_in_two(blocks_of(uneven)), 3)) == [set(), {0}, {0, 4}]


def test_it_ends_with_a_cut_behind_each() -> None:
    *_, last = cuts_in_two(blocks_of(EIGHT))
    assert last == set(range(7))


def test_the_inside_of_a_block_goes_and_its_end_stays() -> None:
    assert blocks_of(EIGHT).inside({3}) == {1, 2, 4, 5, 6}


def test_what_a_later_block_reads_stays() -> None:
    """A branch crosses the cut: the sixth storage is also recomputed from the second."""
    recording = recomputable(EIGHT, 5, (4, 1), 5)
    assert blocks_of(recording).inside({3}) == {2, 4, 5, 6}


def test_of_all_depths_the_one_with_the_least_memory() -> None:
    # Cuts after 1, 3 and 5: these are kept, with 0 and finally 7, or 6 once it is recomputed. One cut gives the same
    # peak with one recompute more.
    plan = made_plan("chen-recursive", EIGHT)
    assert recomputed(plan) == {2, 4, 6}
    assert recomputed_peak_bytes(EIGHT, plan) == RESIDENT + 50


def test_under_a_budget_the_depth_that_costs_least() -> None:
    assert recomputed(made_plan("chen-recursive", EIGHT, RESIDENT + 70)) == {6}
