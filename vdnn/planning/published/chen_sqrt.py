"""chen-sqrt: keeps only the end of every segment of the forward pass (Chen et al., 2016, arXiv 1604.06174).

The chain is the storages of the step in the order of their saves. A storage is recomputed if it, and all recomputed
storages that it is made from, hold at most the bytes of a segment. The next storage is kept, and a new segment begins.
Storages that cannot be recomputed are kept and end the segments that lead to them. With n equal storages and segments
of sqrt(n), about 2 sqrt(n) of them are on the device at once.
"""

from __future__ import annotations

import math

from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import RecomputedSteps, plan_of_recomputes
from vdnn.step.plan import Plan

_TRIES = 6  # sizes between half the root and twice the root


class ChenSqrt(PlanPolicy):
    """`segment_bytes`: use this size of a segment instead of searching for one.

    As in the paper, the search begins at the root of (bytes of all storages) x (bytes of the largest one), and tries
    sizes around it. Differences from the paper: sizes go on in the same ratio down to the smallest storage and up to
    the bytes of all of them, and the plan is the one with the shortest step that fits the budget. Without a budget it
    is the one with the least memory, which is what the paper minimizes. The numbers of the search are from memory of
    the paper.
    """

    def __init__(self, segment_bytes: int | None = None) -> None:
        self._segment_bytes = segment_bytes

    @property
    def name(self) -> str:
        return "chen-sqrt"

    @property
    def source(self) -> str:
        return "Chen et al., 2016: sublinear memory, segments of sqrt(n)"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None and request.budget_bytes is not None:
            return keep_everything(request, self.name)
        steps = RecomputedSteps(request.recording)
        sizes = segment_sizes(steps) if self._segment_bytes is None else [self._segment_bytes]
        for size in sizes:
            steps.step(inside_segments(steps, size))
        if self._segment_bytes is None:
            steps.step(())
        return plan_of_recomputes(request, self.name, steps.best(budget_bytes).chosen)


def segment_sizes(steps: RecomputedSteps) -> list[int]:
    sizes = [steps.recording.lifetimes[index].nbytes for index in steps.candidates]
    if not sizes:
        return []
    root, ratio = math.sqrt(sum(sizes) * max(sizes)), 2 ** (2 / _TRIES)
    down = math.ceil(math.log(root / min(sizes), ratio))
    up = math.ceil(math.log(sum(sizes) / root, ratio))
    return sorted({math.ceil(root * ratio**power) for power in range(-down, up + 1)})


def inside_segments(steps: RecomputedSteps, segment_bytes: int) -> set[int]:
    """The storages inside segments, which are recomputed."""
    needed: dict[int, frozenset[int]] = {}  # by recomputed storage: all recomputes that it needs, its own included
    for index, recompute in steps.recomputes.items():
        together = frozenset((index,)).union(*(needed.get(source, ()) for source in recompute.inputs))
        if sum(steps.recording.lifetimes[one].nbytes for one in together) <= segment_bytes:
            needed[index] = together
    return set(needed)
