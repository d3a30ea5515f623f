"""Chooses the anchors: the intervals of a step that the bound considers, because a long step has too many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vdnn.planning.gaps import Gap


def choose_anchors(missing: Sequence[int], gaps: Sequence[Gap], most: int) -> list[int]:
    """The intervals over the budget, if there are at most `most` of them. Otherwise `most` of them, evenly from the
    first to the last; the one that is over the budget most; and those with the least room with everything absent, where
    each reload waits for the use of the previous one. The last add at most half as many numbers to the program again.

    `missing`: by how many bytes every interval is over the budget with everything kept.
    """
    over = [interval for interval, nbytes in enumerate(missing) if nbytes > 0]
    if len(over) <= most:
        return over
    chosen = {over[round(number * (len(over) - 1) / (most - 1))] for number in range(most)}
    chosen.add(max(over, key=lambda interval: missing[interval]))
    changes = [0] * (len(missing) + 1), [0] * (len(missing) + 1)  # of absent bytes, and of gaps across an interval
    for gap in gaps:
        for change, amount in zip(changes, (gap.nbytes, 1), strict=True):
            change[gap.first] += amount
            change[gap.last + 1] -= amount
    absent, across = (list(itertools.accumulate(change)) for change in changes)
    left = most * len(gaps) // 2
    for interval in sorted(over, key=lambda one: absent[one] - missing[one]):
        left -= across[interval]
        if left < 0:
            break
        chosen.add(interval)
    return sorted(chosen)
