"""chen-sqrt: of every segment of the forward pass only its end is kept (Chen et al., 2016, arXiv 1604.06174).

The step's storages in the order of their saves are the chain. One is given up as long as what its rebuild would bring
with it, itself and all that was given up before it on its way, is no more than a segment's bytes; the next is kept, and
a new segment begins. What cannot be rebuilt is kept, too, and ends the segments that lead to it. With n like storages
and segments of sqrt(n), about 2 sqrt(n) of them are there at once.

The size of a segment is searched for as in the paper: the root of what all and of what the largest storage takes, and
sizes around it. Under a budget of all sizes tried the one with the shortest step that fits is taken; for that the sizes
go on, in the same ratio, down to the smallest storage and up to all of them. Without a budget it is the least memory.
The numbers of the search are from memory of the paper.
"""

from __future__ import annotations

import math

from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import RebuiltSteps, plan_of_rebuilds
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording

_TRIES = 6  # sizes between half the root and twice it


class ChenSqrt(PlanPolicy):
    """`segment_bytes`: no search, but this size."""

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
        steps = RebuiltSteps(request.recording)
        sizes = segment_sizes(steps) if self._segment_bytes is None else [self._segment_bytes]
        for size in sizes:
            steps.step(inside_segments(steps, size))
        if self._segment_bytes is None:
            steps.step(())
        return plan_of_rebuilds(request, self.name, steps.best(budget_bytes).chosen)


def segment_sizes(steps: RebuiltSteps) -> list[int]:
    sizes = [steps.recording.lifetimes[index].nbytes for index in steps.candidates]
    if not sizes:
        return []
    root, ratio = math.sqrt(sum(sizes) * max(sizes)), 2 ** (2 / _TRIES)
    down = math.ceil(math.log(root / min(sizes), ratio))
    up = math.ceil(math.log(sum(sizes) / root, ratio))
    return sorted({math.ceil(root * ratio**power) for power in range(-down, up + 1)})


def inside_segments(steps: RebuiltSteps, segment_bytes: int) -> set[int]:
    """What is given up."""
    brought: dict[int, frozenset[int]] = {}  # by what is given up: what its rebuild brings with it
    for index in steps.candidates:
        together = frozenset((index,)).union(
            *(brought.get(source, ()) for source in _inputs(steps.recording, index)),
        )
        if sum(steps.recording.lifetimes[one].nbytes for one in together) <= segment_bytes:
            brought[index] = together
    return set(brought)


def _inputs(recording: Recording, index: int) -> tuple[int, ...]:
    rebuild = recording.lifetimes[index].rebuild
    return () if rebuild is None else rebuild.inputs
