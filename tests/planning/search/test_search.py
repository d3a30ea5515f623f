"""The search passes the order of each choice to the native core."""

from __future__ import annotations

from tests.planning.recordings import chain
from tests.planning.reference.schedule import schedule
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.search.local_search import Choice, Search
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
        search = Search(model, gaps, budget, compute_ns=0, effort=1)
        found = search.run([Choice(chosen, furthest_first=furthest_first)])
        assert found is not None
        expected = schedule(recording, gaps, chosen, budget, furthest_first=furthest_first)
        assert absences_by_gap(gaps, found.outcome.absences) == expected
        outcomes.append(expected)
    assert outcomes[0] != outcomes[1], "the order tells them apart"
