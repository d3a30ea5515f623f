"""vDNN's search for the next storage to prefetch (Rhu et al., MICRO 2016, figure 10).

Before an operation of the backward pass runs, the search looks through the later operations in their order. The first
one that needs an absent storage gets it prefetched. The search ends at a convolution that needs nothing, so that no
storage is reloaded long before its use. During each operation, storages of at most one other operation are prefetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vdnn.planning.gaps import Gap
from vdnn.planning.policies.backward_operations import Operation


def prefetch_points(operations: Sequence[Operation], released: Mapping[Gap, int]) -> dict[Gap, int]:
    """Reload points for gaps with these release points. Gaps that the search does not find are left out.

    The reload point is the last use of the operation during which the copy runs. An operation that uses several absent
    storages gets all of them at once; in the paper a layer has one.
    """
    absent: dict[int, Gap] = {gap.use: gap for gap in released if gap.use is not None}
    found: dict[Gap, int] = {}
    for index, current in enumerate(operations):
        if not absent:
            break
        launch = current.uses[-1]
        for use in current.uses:
            absent.pop(use, None)  # too late: reloaded on demand
        for later in operations[index + 1 :]:
            needed = [use for use in later.uses if use in absent and released[absent[use]] < launch]
            for use in needed:
                found[absent.pop(use)] = launch
            if needed or later.is_convolution:
                break
    return found
