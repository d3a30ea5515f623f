"""The readable form of csrc/planning/covers.h: the orders in which gaps are left out of a choice.

Covers are choices of gaps that free enough memory in every interval, and of which no gap can be left out.

Where the copies take longer than the computation, the shortest step is nearly the one that moves least, and that is a
cover. Leaving out gaps one by one, as long as the others still meet the budget, makes a cover; each order makes its
own. The orders here leave out first what is absent for the shortest time, what is largest, what is smallest, what is
saved last; and some are random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap

_RANDOM_ORDERS = 8
# A cover near another first lets in up to so many gaps that the other leaves out: a share of them, but a few at least.
_RETURNED_SHARE, _RETURNED_AT_LEAST = 0.05, 6


def absence_times(compute_ns: Sequence[int], gaps: Sequence[Gap], costs: LinkCosts) -> list[tuple[float, float]]:
    """For each gap how long it is, and how long its two copies take. `compute_ns` has every interval of the step."""
    reached = [0, *itertools.accumulate(compute_ns)]
    copies_ns = 1e9 / costs.to_host_bytes_per_s + 1e9 / costs.to_device_bytes_per_s  # of one byte, both ways
    return [(reached[gap.last + 1] - reached[gap.release_point + 1], gap.nbytes * copies_ns) for gap in gaps]


def orders_of_leaving_out(compute_ns: Sequence[int], gaps: Sequence[Gap], costs: LinkCosts) -> Iterator[list[int]]:
    """The orders in which gaps are left out."""
    times = absence_times(compute_ns, gaps, costs)
    every = range(len(gaps))
    keys: tuple[Callable[[int], float], ...] = (
        lambda gap: times[gap][0] - times[gap][1],
        lambda gap: times[gap][0] / times[gap][1],
        lambda gap: -gaps[gap].nbytes,
        lambda gap: gaps[gap].nbytes,
        lambda gap: -gap,
    )
    if costs.issue_ns:  # fewer copies to issue: what frees few bytes, or frees them in few intervals, is left out first
        keys = (*keys, lambda gap: gaps[gap].nbytes * (gaps[gap].last - gaps[gap].first + 1))
    for key in keys:
        yield sorted(every, key=key)
    draw = random.Random(0)
    for _ in range(_RANDOM_ORDERS):
        yield draw.sample(every, len(gaps))


def order_near(may_leave: bytes, draw: random.Random) -> list[int]:
    """An order for a cover that resembles `may_leave`: most of what that leaves out comes first."""
    used = [gap for gap, flag in enumerate(may_leave) if flag]
    left_out = [gap for gap, flag in enumerate(may_leave) if not flag]
    most = min(len(left_out), max(_RETURNED_AT_LEAST, round(len(left_out) * _RETURNED_SHARE)))
    returned = draw.sample(left_out, draw.randint(0, most))
    draw.shuffle(used)
    without = frozenset(returned)
    return [*(gap for gap in left_out if gap not in without), *used, *returned]
