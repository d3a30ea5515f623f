"""Offloading layer by layer (Rhu et al., MICRO 2016): what vdnn-all, vdnn-conv and vdnn-dyn have in common.

A storage goes once: after its last consumer in the forward pass, when nobody holds it any more. With the barrier of the
paper the next layer does not begin before the copies of the one before are done: the compute stream waits for the copy
at the end of the layer. Without it (as in vDNN++, Shriram et al., IPDPS 2019) a storage is given up when its copy is
done, and waited for only where the budget needs its room. What comes back follows the paper's search; what that does
not find is brought back when it is used.

A plan has no barrier in the backward pass: there a copy back is waited for when it is used, which is the end of the
same layer if the next one is the one that uses it. Also left out: that the authors' code frees a convolution's output
before its backward, which in PyTorch is for autograd to say, and the one buffer for all gradient maps.
"""

from __future__ import annotations

from collections.abc import Callable

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.backward_operations import operations_of
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.policies.prefetch_window import prefetch_points
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.policies.swap_schedule import brought_back_at, release_when_copied
from vdnn.planning.policies.under_budget import Lifetimes
from vdnn.step.recording import Lifetime


def layerwise(request: PlanRequest, may_leave: Callable[[Lifetime], bool], *, has_barrier: bool) -> Lifetimes:
    """What becomes of every lifetime when those that may leave do."""
    recording = request.recording
    first_gaps: dict[int, Gap] = {}
    for gap in gaps_of(recording):
        if may_leave(recording.lifetimes[gap.lifetime]):
            first_gaps.setdefault(gap.lifetime, gap)
    gaps = list(first_gaps.values())
    if has_barrier:
        released = _release_at_end_of_layer(gaps)
    else:
        clock = StepClock(recording, request.costs)
        released = release_when_copied(recording, clock, gaps, request.budget_bytes)
    reload_points = prefetch_points(operations_of(recording), released)
    return planned_lifetimes(recording, brought_back_at(released, reload_points))


def _release_at_end_of_layer(gaps: list[Gap]) -> dict[Gap, int]:
    """At the first point after that from which a copy could be made, when everybody else has let go. What would be
    needed again by then stays."""
    ends = {gap: max(gap.release_point + 1, gap.first - 1) for gap in gaps}
    return {gap: end for gap, end in ends.items() if end < gap.last}
