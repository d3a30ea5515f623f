"""chen-recursive: cuts the forward pass in two, and the largest segment again (Chen et al., 2016, arXiv 1604.06174).

The storages at the cuts are kept and all others are recomputed. The segment with the most bytes is cut first, where
half of its bytes are saved. Several numbers of cuts are tried. The plan is the one with the shortest step under the
budget, or, without a budget, the one with the least memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import RecomputedSteps, plan_of_recomputes
from vdnn.planning.published.save_blocks import SaveBlocks
from vdnn.step.plan import Plan

# All numbers of cuts below _EACH are tried, and from there on about each that is 1/_GROWTH larger than the one before.
_EACH = 32
_GROWTH = 16


class ChenRecursive(PlanPolicy):
    """Deterministic, without parameters.

    Differences from the paper: its recursion treats the inside of a segment as it treats the whole. With one cut per
    level, n storages need log2(n) at once, and one forward pass for each level. For that, recomputed storages are
    discarded and recomputed again at every level. A plan recomputes a storage once, and then it stays, so here the
    recursion only says where the cuts are. The memory is that of the best cuts, no better than sqrt(n), and the step
    takes at most one more forward pass.
    """

    @property
    def name(self) -> str:
        return "chen-recursive"

    @property
    def source(self) -> str:
        return "Chen et al., 2016: sublinear memory, its recursion, each storage recomputed once"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None and request.budget_bytes is not None:
            return keep_everything(request, self.name)
        steps = RecomputedSteps(request.recording)
        blocks = SaveBlocks(steps)
        steps.step(())
        for number, cuts in enumerate(cuts_in_two(blocks)):
            if number < _EACH or number % (number // _GROWTH) == 0:
                steps.step(blocks.inside(cuts))
        return plan_of_recomputes(request, self.name, steps.best(budget_bytes).chosen)


def cuts_in_two(blocks: SaveBlocks) -> Iterator[frozenset[int]]:
    """Yields no cut, one cut, two cuts and so on: the largest segment is cut where half of its bytes are saved."""
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
