"""The rates of a link, measured from the copies of a step."""

from __future__ import annotations

import pytest

from vdnn.planning.costs import LinkCosts, measured_costs
from vdnn.step.timeline import Copy, Timeline, Track

MIB = 1 << 20
ASSUMED = LinkCosts(4e9, 2e9, 4.5e9, 7)  # both ways reach three quarters of the sum


def timeline(*copies: Copy) -> Timeline:
    return Timeline("measured", "a clock", 10_000_000, (), copies)


def test_each_direction_has_the_rate_of_its_large_copies_and_both_ways_their_share_of_the_sum() -> None:
    there = Copy(Track.TO_HOST, 0, 4 * MIB, 0, 1_000_000)
    small = Copy(Track.TO_HOST, 1, MIB - 1, 0, 5_000_000)
    back = Copy(Track.TO_DEVICE, 0, 3 * MIB, 0, 1_000_000)
    costs = measured_costs(timeline(there, small, back), ASSUMED)
    rates = (4 * MIB * 1e3, 3 * MIB * 1e3)
    assert (costs.to_host_bytes_per_s, costs.to_device_bytes_per_s) == pytest.approx(rates)
    assert costs.duplex_bytes_per_s == pytest.approx(0.75 * sum(rates))
    assert costs.latency_ns == 7


def test_both_ways_are_never_slower_than_the_faster_one() -> None:
    there = Copy(Track.TO_HOST, 0, 40 * MIB, 0, 1_000_000)
    costs = measured_costs(timeline(there), ASSUMED)
    assert costs.to_device_bytes_per_s == 2e9, "no copy says another"
    assert costs.duplex_bytes_per_s == costs.to_host_bytes_per_s
