"""dtr: storages are evicted when memory is short, by cost, bytes, staleness and neighbourhood."""

from __future__ import annotations

from tests.planning.policies.steps import made_plan
from tests.planning.published.recomputed_chains import RESIDENT, recomputed, recomputed_chain, recomputed_peak_bytes
from tests.planning.recordings import recomputable

# A chain of four of ten bytes has saves at 0 to 3 and uses at 4 (of 3) to 7 (of 0). Point p is reached at (p + 1) *
# 1000 ns. Before point 3 all four are on the device; the third was accessed 1000 ns ago, the second 2000 ns.


def test_of_equal_cost_the_stalest_goes() -> None:
    recording = recomputed_chain([10] * 4, [5, 5, 5])
    assert recomputed(made_plan("dtr", recording, RESIDENT + 35)) == {1}


def test_the_cheapest_goes_before_the_stalest() -> None:
    recording = recomputed_chain([10] * 4, [11, 5, 5])
    assert recomputed(made_plan("dtr", recording, RESIDENT + 35)) == {2}


def test_the_largest_goes_before_the_stalest() -> None:
    recording = recomputed_chain([10, 10, 25, 10], [5, 5, 5])
    assert recomputed(made_plan("dtr", recording, RESIDENT + 50)) == {2}


def test_the_evicted_neighbourhood_is_part_of_the_cost() -> None:
    """The second storage is evicted before point 3. Then the third is stale for 2000 ns and the fourth for 1000 ns.
    Alone the third would cost 5 / 2000 and the fourth 4 / 1000, but the third also needs the second: 10 / 2000."""
    recording = recomputed_chain([10] * 5, [5, 5, 4, 5])
    assert recomputed(made_plan("dtr", recording, RESIDENT + 30)) == {1, 3}
    apart = recomputed_chain([10] * 5, [5, 0, 4, 5])
    apart = recomputable(apart, 2, (0,), 5)
    assert recomputed(made_plan("dtr", apart, RESIDENT + 30)) == {1, 2}


def test_what_is_waiting_for_it_is_part_of_the_cost_too() -> None:
    # The third is cheap and is evicted first; its recompute would then need the second.
    recording = recomputed_chain([10] * 5, [30, 2, 14, 5])
    # Scores before point 4: the second 30 + 2 over 3000 ns, the fourth 14 + 2 over 1000 ns.
    assert recomputed(made_plan("dtr", recording, RESIDENT + 30)) == {2, 1}
    dearer = recomputed_chain([10] * 5, [47, 2, 14, 5])
    assert recomputed(made_plan("dtr", dearer, RESIDENT + 30)) == {2, 3}


def test_only_as_much_as_is_short_goes() -> None:
    recording = recomputed_chain([10] * 9, [5] * 8)
    plan = made_plan("dtr", recording, RESIDENT + 70)
    assert len(recomputed(plan)) == 2
    assert recomputed_peak_bytes(recording, plan) <= RESIDENT + 70


def test_a_recompute_makes_room_for_itself() -> None:
    """The recompute of the third storage needs 25 bytes more, so the second has to be evicted for it."""
    plain = recomputed_chain([10] * 4, [20, 5, 0])
    recording = recomputable(plain, 2, (0,), 5, extra=25)
    assert recomputed(made_plan("dtr", plain, RESIDENT + 35)) == {2}
    assert recomputed(made_plan("dtr", recording, RESIDENT + 45)) == set()
    assert recomputed(made_plan("dtr", recording, RESIDENT + 39)) == {1, 2}


def test_what_was_used_stays() -> None:
    """The plan can discard nothing more, and its peak shows that it exceeds the budget."""
    recording = recomputed_chain([10] * 4, [5, 5, 5])
    plan = made_plan("dtr", recording, RESIDENT + 20)
    assert recomputed(plan) == {1, 2}
    assert recomputed_peak_bytes(recording, plan) == RESIDENT + 30


def test_without_a_budget_nothing_is_evicted() -> None:
    assert not recomputed(made_plan("dtr", recomputed_chain([10] * 4, [5, 5, 5])))
