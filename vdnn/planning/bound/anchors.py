"""Which intervals of a step the bound looks at: it cannot afford all of a long one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vdnn.planning.gaps import Gap


def choose_anchors(missing: Sequence[int], gaps: Sequence[Gap], most: int) -> list[int]:
    """The intervals that would not fit: all, or the worst, so many evenly between the first and the last, and
    those with the least room when everything is away, where each copy back waits for the one before it to be used.
    Of these as many as add half as many numbers again."""
    over = [interval for interval, nbytes in enumerate(missing) if nbytes > 0]
    if len(over) <= most:
        return over
    chosen = {over[round(place * (len(over) - 1) / (most - 1))] for place in range(most)}
    chosen.add(max(over, key=lambda interval: missing[interval]))
    changes = [0] * (len(missing) + 1), [0] * (len(missing) + 1)  # of bytes away, and of gaps across
    for gap in gaps:
        for change, amount in zip(changes, (gap.nbytes, 1), strict=True):
            change[gap.first] += amount
            change[gap.last + 1] -= amount
    away, across = (list(itertools.accumulate(change)) for change in changes)
    left = most * len(gaps) // 2
    for interval in sorted(over, key=lambda one: away[one] - missing[one]):
        left -= across[interval]
        if left < 0:
            break
        chosen.add(interval)
    return sorted(chosen)
