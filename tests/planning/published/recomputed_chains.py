"""Steps for tests of recomputing policies: chains in which each storage is recomputed from the one before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.planning.recordings import RESIDENT, chain, recomputable
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import Recording

__all__ = ["RESIDENT", "least_peak_bytes", "recomputed", "recomputed_chain", "recomputed_peak_bytes"]


def recomputed_chain(sizes: Sequence[int], costs_ns: Sequence[int], compute_ns: int = 1000) -> Recording:
    """`costs_ns`: recompute costs of the second storage, the third and so on; 0 means that it cannot be recomputed."""
    recording = chain(sizes, compute_ns)
    for index, cost_ns in enumerate(costs_ns, 1):
        if cost_ns:
            recording = recomputable(recording, index, (index - 1,), cost_ns)
    return recording


def recomputed(plan: Plan) -> set[int]:
    return {index for index, one in enumerate(plan.lifetimes) if one.action is Action.RECOMPUTE}


def recomputed_peak_bytes(recording: Recording, plan: Plan) -> int:
    """The peak of a plan that offloads nothing."""
    assert not plan.offloaded_bytes
    return with_recomputes(recording, recomputed(plan)).peak_bytes


def least_peak_bytes(recording: Recording) -> int:
    """The least peak over all choices of recomputes."""
    candidates = candidates_of(recording)
    return min(
        with_recomputes(recording, chosen).peak_bytes
        for count in range(len(candidates) + 1)
        for chosen in itertools.combinations(candidates, count)
    )
