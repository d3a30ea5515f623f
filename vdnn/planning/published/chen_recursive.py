"""chen-recursive: segments that are cut in two, and again, where most is left (Chen et al., 2016, arXiv 1604.06174).

The paper's recursion sees a segment as one operation, and treats its inside as it treats the whole: with one cut a
level, n storages need log2(n) at once, and a forward pass for each level. For that what was rebuilt has to be given up
and rebuilt again, once a level. A plan rebuilds a storage once, and then it stays: so here the recursion only says
where cuts are, the segment with the most bytes first, at its middle, and not that what lies between them goes again.
Its memory is that of the best cuts, no better than sqrt(n), and its time one forward pass more at the most.

Of all depths tried the one with the shortest step under the budget is taken; without a budget the least memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import RebuiltSteps, plan_of_rebuilds
from vdnn.planning.published.save_blocks import SaveBlocks
from vdnn.step.plan import Plan

# So many numbers of cuts one after the other; then only every so much more.
_EACH = 32
_GROWTH = 16


class ChenRecursive(PlanPolicy):
    """Deterministic, without parameters."""

    @property
    def name(self) -> str:
        return "chen-recursive"

    @property
    def source(self) -> str:
        return "Chen et al., 2016: sublinear memory, its recursion, each storage rebuilt once"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None and request.budget_bytes is not None:
            return keep_everything(request, self.name)
        steps = RebuiltSteps(request.recording)
        blocks = SaveBlocks(steps)
        steps.step(())
        for number, cuts in enumerate(cuts_in_two(blocks)):
            if number < _EACH or number % (number // _GROWTH) == 0:
                steps.step(blocks.inside(cuts))
        return plan_of_rebuilds(request, self.name, steps.best(budget_bytes).chosen)


def cuts_in_two(blocks: SaveBlocks) -> Iterator[frozenset[int]]:
    """No cut, one, two: the largest segment is cut where half of its bytes are saved."""
    cuts: frozenset[int] = frozenset()
    yield cuts
    last = len(blocks.order) - 1
    segments = [(-blocks.bytes_between(0, last), 0, last)] if last > 0 else []
    while segments:
        most, first, last = heapq.heappop(segments)
        if first == last:
            continue
        middle, held = first, blocks.bytes_between(first, first)
        while middle + 1 < last and 2 * held < -most:
            middle += 1
            held += blocks.bytes_between(middle, middle)
        cuts |= {middle}
        yield cuts
        heapq.heappush(segments, (-held, first, middle))
        heapq.heappush(segments, (most + held, middle + 1, last))
