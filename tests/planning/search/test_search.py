"""The search passes the order of each choice to the native core."""

from __future__ import annotations

from tests.planning.recordings import chain
from tests.planning.reference.local_search import polish
from tests.planning.reference.schedule import schedule
from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.search.step_model import absences_by_gap, make_step_model

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # one nanosecond for each byte


def test_each_order_of_a_choice_is_scheduled_so() -> None:
    """Ten bytes are missing. The gaps are in the order of their uses. By default the storage that is used first is
    released; with `furthest_first`, the one that is used last."""
    recording = chain([10, 10, 10])
    gaps = tuple(sorted(gaps_of(recording), key=lambda gap: gap.use or 0))
    model = make_step_model(recording, gaps, EVEN)
    budget = recording.peak_bytes - 10
    chosen = bytes([1] * len(gaps))
    outcomes = []
    for furthest_first in (False, True):
        starts = [(chosen, False, furthest_first)]
        found = _C.local_search(model=model, budget_bytes=budget, kept_ns=0, effort=1, starts=starts)
        assert found is not None
        expected = schedule(recording, gaps, chosen, budget, furthest_first=furthest_first)
        assert absences_by_gap(gaps, found.absences) == expected
        outcomes.append(expected)
    assert outcomes[0] != outcomes[1], "the order tells them apart"


def test_the_best_of_the_starts_is_returned() -> None:
    """Three bytes are missing. To move a storage takes a nanosecond for each of its bytes, which nothing hides."""
    recording = chain([40, 20, 5, 30], compute_ns=0)
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, EVEN)
    budget = recording.peak_bytes - 3
    starts = [(bytes(one == index for one in range(len(gaps))), False, False) for index in range(3)]
    taken = [model.evaluate(may_leave, budget) for may_leave, _, _ in starts]
    times = [one.step_ns for one in taken if one is not None]
    assert sorted(times, reverse=True) == times
    assert len(set(times)) == len(starts)
    for order in (starts, starts[::-1]):
        found = _C.local_search(model=model, budget_bytes=budget, kept_ns=0, effort=len(starts), starts=order)
        assert found is not None
        assert found.step_ns == times[-1]


def test_a_reload_that_is_too_late_is_moved_ahead_by_as_many_points_as_it_needs() -> None:
    """Its copy takes 25 ns, and each point 10: it has to begin three points before its use."""
    recording = chain([25, 9, 9, 9, 9, 9], compute_ns=10)
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, EVEN)
    number, gap = next((number, gap) for number, gap in enumerate(gaps) if gap.nbytes == 25)
    assert gap.use is not None
    late = [(number, gap.release_point + 3, gap.use - 1)]
    in_time = [(number, gap.release_point + 3, gap.use - 3)]
    compute_ns = 10 * len(recording.points)
    assert model.replay(late).step_ns > model.replay(in_time).step_ns == compute_ns
    best, best_ns = polish(model, gaps, recording.peak_bytes - 5, late, model.replay(late).step_ns, 100)
    assert best_ns == model.replay(best).step_ns == compute_ns
    assert [one[0] for one in best] == [number], "without it the step is over the budget"
