"""Offloads layer by layer (Rhu et al., MICRO 2016): the schedule that vdnn-all, vdnn-conv and vdnn-dyn share.

A storage is offloaded once, after its last consumer in the forward pass, when it has no other holder. With the paper's
barrier, the compute stream waits for the copies of a layer at the end of that layer. Without it (as in vDNN++, Shriram
et al., IPDPS 2019), a storage is released when its copy is complete, and the step waits only if the budget needs the
room. Reloads follow the paper's search (below); a storage that it does not find is reloaded on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.backward_operations import BackwardOperation, operations_of
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.policies.swap_schedule import brought_back_at, release_when_copied
from vdnn.planning.policies.under_budget import Lifetimes
from vdnn.step.recording import Lifetime


def layerwise(request: PlanRequest, may_leave: Callable[[Lifetime], bool], *, has_barrier: bool) -> Lifetimes:
    """Plans every lifetime: those that `may_leave` allows are offloaded, all others are kept.

    Differences from the paper: a plan has no barrier in the backward pass. The step waits for a reload at its use,
    which is the end of the same layer if the next layer uses it. The authors' code also frees a convolution's output
    before its backward, which autograd decides in PyTorch, and has one buffer for all gradient maps; both are left out.
    """
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
    """Releases at the first point after the copy point, once there is no other holder. A gap that ends before that is
    left out."""
    ends = {gap: max(gap.release_point + 1, gap.first - 1) for gap in gaps}
    return {gap: end for gap, end in ends.items() if end < gap.last}


# vDNN's search for the next storage to prefetch (Rhu et al., MICRO 2016, figure 10).
#
# Before an operation of the backward pass runs, the search looks through the later operations in their order. The first
# one that needs an absent storage gets it prefetched. The search ends at a convolution that needs nothing, so that no
# storage is reloaded long before its use. During each operation, storages of at most one other operation are
# prefetched.


def prefetch_points(operations: Sequence[BackwardOperation], released: Mapping[Gap, int]) -> dict[Gap, int]:
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
