"""prefix-cut: plans stay under the budget and keep storages from the end, and the error names the smallest budget."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.recordings import RESIDENT, any_recording, chain
from vdnn.errors import BudgetError
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.search.prefix_cut import prefix_cut
from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


def test_a_step_that_fits_is_kept_whole() -> None:
    recording = chain([10, 20, 30])
    plan = prefix_cut(recording, recording.peak_bytes)
    assert [one.action for one in plan.lifetimes] == [Action.KEEP] * 3
    assert plan.budget_bytes == recording.peak_bytes


def test_what_was_saved_last_is_kept_first() -> None:
    recording = chain([10, 10, 10, 10])
    plan = prefix_cut(recording, recording.peak_bytes - 10)
    assert [one.action for one in plan.lifetimes] == [Action.OFFLOAD, Action.KEEP, Action.KEEP, Action.KEEP]


def test_it_goes_late_and_comes_back_early_within_the_budget() -> None:
    recording = chain([10, 10, 10, 10])
    (first, *_) = prefix_cut(recording, recording.peak_bytes - 10).lifetimes
    # Saves are at 0 to 3, uses at 4 to 7. All four are alive in the intervals before points 3 (the operation that
    # computes the last), 4 and 5 (its use), so the first has to be absent in these.
    assert first.absences == (Absence(2, 5),)


def test_more_budget_offloads_no_more() -> None:
    recording = chain([7, 13, 5, 11, 3])
    least = max(interval_bytes(recording, prefix_cut_least(recording)))
    moved = [prefix_cut(recording, budget).offloaded_bytes for budget in range(least, recording.peak_bytes + 1)]
    assert moved == sorted(moved, reverse=True)


def prefix_cut_least(recording: Recording) -> tuple[PlannedLifetime, ...]:
    with pytest.raises(BudgetError) as refused:
        prefix_cut(recording, 1)
    return prefix_cut(recording, refused.value.least_bytes).lifetimes


def test_a_budget_that_cannot_be_met_names_the_place_and_the_smallest_that_can() -> None:
    recording = chain([10, 40, 10])
    with pytest.raises(BudgetError) as refused:
        prefix_cut(recording, RESIDENT + 39)
    assert refused.value.least_bytes == RESIDENT + 40
    assert "layer1" in refused.value.where
    assert prefix_cut(recording, RESIDENT + 40).budget_bytes == RESIDENT + 40


def every_way(lifetime: Lifetime, end: int) -> list[PlannedLifetime]:
    """All ways to plan a lifetime: kept, or absent in any of the gaps between its uses, starting at any point of the
    gap."""
    gaps = [(lifetime.copy_point, lifetime.uses[0] if lifetime.uses else end)]
    gaps += [(use, later) for use, later in itertools.pairwise(lifetime.uses)]
    choices = [[None, *(Absence(point) for point in range(begin, gap_end))] for begin, gap_end in gaps]
    ways = (tuple(one for one in way if one is not None) for way in itertools.product(*choices))
    return [PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if way else Action.KEEP, way) for way in ways]


@given(any_recording(most=3))
def test_the_smallest_budget_is_truly_the_smallest(recording: Recording) -> None:
    """Reloads before the use only add memory, so the search without them misses no smaller footprint."""
    end = len(recording.points) - 1
    ways = [every_way(lifetime, end) for lifetime in recording.lifetimes]
    least = min(max(interval_bytes(recording, planned)) for planned in itertools.product(*ways))
    assert max(interval_bytes(recording, prefix_cut_least(recording))) == least
    with pytest.raises(BudgetError) as refused:
        prefix_cut(recording, least - 1)
    assert refused.value.least_bytes == least


@given(any_recording(), st.floats(0, 1))
def test_a_plan_is_under_its_budget_at_every_point(recording: Recording, share: float) -> None:
    least = max(interval_bytes(recording, prefix_cut_least(recording)))
    budget = least + round(share * (recording.peak_bytes - least))
    assert max(interval_bytes(recording, prefix_cut(recording, budget).lifetimes)) <= budget
