"""A lower bound on the time in which the host issues a step under a budget.

Whatever the plan, the host issues the operations of the step. In each interval that is over the budget with everything
kept, enough bytes are absent: each storage that is absent there was copied to the host and, if a use follows, back, or
it is recomputed. The least host time for these bytes, with parts of storages allowed, belongs to the step as well.
What a recompute needs besides, such as the recompute of its inputs, is left out: the bound is lower, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap
from vdnn.planning.recomputing import candidates_of, host_cost_ns
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


def host_bound_ns(recording: Recording, gaps: Sequence[Gap], costs: LinkCosts, budget_bytes: int) -> int:
    """No plan under the budget is issued in less time. 0 if nothing is known of the host."""
    if not recording.has_host:
        return 0
    ways = _ways_of(recording, gaps, costs)
    missing = [point.peak_bytes - budget_bytes for point in recording.points]
    most = 0.0
    for interval in sorted(range(len(missing)), key=lambda one: -missing[one])[:_INTERVALS]:
        if missing[interval] > 0:
            most = max(most, _least_ns(ways, interval, missing[interval]))
    return recording.issue_ns + int(most)


_INTERVALS = 50  # those over the budget by the most are considered


# Of a lifetime: its intervals of absence, its bytes, and the host time of the absence.
_Way = tuple[int, range, int, int]


def _ways_of(recording: Recording, gaps: Sequence[Gap], costs: LinkCosts) -> list[_Way]:
    """All ways to be absent, the least host time for each byte first."""
    ways = [
        (gap.lifetime, range(gap.first, gap.last + 1), gap.nbytes, costs.issue_ns * (1 if gap.use is None else 2))
        for gap in gaps
    ]
    for index in candidates_of(recording):
        lifetime = recording.lifetimes[index]
        recompute = lifetime.recompute
        if recompute is not None:
            intervals = absent_intervals(lifetime, Absence(recompute.known_point))
            # A recompute that nobody asks for takes no time.
            issue_ns = host_cost_ns(recompute) - (0 if lifetime.uses else recompute.issue_ns)
            ways.append((index, intervals, lifetime.nbytes, issue_ns))
    return sorted(ways, key=lambda way: way[3] / way[2])


def _least_ns(ways: Sequence[_Way], interval: int, missing: int) -> float:
    spent, seen = 0.0, set[int]()
    for lifetime, intervals, nbytes, issue_ns in ways:
        if interval in intervals and lifetime not in seen:
            seen.add(lifetime)
            spent += issue_ns * min(1.0, missing / nbytes)
            missing -= nbytes
            if missing <= 0:
                break
    return spent
