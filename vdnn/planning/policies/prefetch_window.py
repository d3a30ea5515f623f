"""vDNN's search for what to bring back next (Rhu et al., MICRO 2016, figure 10).

Before an operation of the backward pass runs, the operations behind it are looked through in their order: the first one
that needs something which is away gets it. The search ends at a convolution that needs nothing, so that nothing is
brought back long before it is used. Each operation brings back for at most one other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vdnn.planning.gaps import Gap
from vdnn.planning.policies.backward_operations import Operation


def prefetch_points(operations: Sequence[Operation], released: Mapping[Gap, int]) -> dict[Gap, int]:
    """Reload points for gaps, by their release points. What nobody brings back ahead of its use is not in it.

    The point is the last request of the operation during which the copy runs. An operation that uses several storages
    that are away gets them all at once: in the paper a layer has one.
    """
    away: dict[int, Gap] = {gap.use: gap for gap in released if gap.use is not None}
    found: dict[Gap, int] = {}
    for place, current in enumerate(operations):
        if not away:
            break
        launch = current.uses[-1]
        for use in current.uses:
            away.pop(use, None)  # too late: it was asked for
        for later in operations[place + 1 :]:
            needed = [use for use in later.uses if use in away and released[away[use]] < launch]
            for use in needed:
                found[away.pop(use)] = launch
            if needed or later.is_convolution:
                break
    return found
