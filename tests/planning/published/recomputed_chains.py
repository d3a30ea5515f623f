"""Steps by hand for tests of policies that recompute: chains of which each storage is made from the one before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.planning.recordings import RESIDENT, chain, rebuildable
from vdnn.planning.recomputing import candidates_of, with_rebuilds
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import Recording

__all__ = ["RESIDENT", "least_peak_bytes", "rebuilt", "rebuilt_chain", "rebuilt_peak_bytes"]


def rebuilt_chain(sizes: Sequence[int], costs_ns: Sequence[int], compute_ns: int = 1000) -> Recording:
    """`costs_ns` are those of the second, the third and so on; 0: it cannot be rebuilt."""
    recording = chain(sizes, compute_ns)
    for index, cost_ns in enumerate(costs_ns, 1):
        if cost_ns:
            recording = rebuildable(recording, index, (index - 1,), cost_ns)
    return recording


def rebuilt(plan: Plan) -> set[int]:
    return {index for index, one in enumerate(plan.lifetimes) if one.action is Action.RECOMPUTE}


def rebuilt_peak_bytes(recording: Recording, plan: Plan) -> int:
    """Of a plan that moves nothing."""
    assert not plan.offloaded_bytes
    return with_rebuilds(recording, rebuilt(plan)).peak_bytes


def least_peak_bytes(recording: Recording) -> int:
    """Of all choices of rebuilds."""
    candidates = candidates_of(recording)
    return min(
        with_rebuilds(recording, chosen).peak_bytes
        for count in range(len(candidates) + 1)
        for chosen in itertools.combinations(candidates, count)
    )
