"""The time in which the host issues a step of a whole training under a placement.

Step follows step no faster than that. See [Note: The host lane] in csrc/planning/step_timeline.h: the host runs ahead.
"""

from __future__ import annotations

from vdnn.planning.training.placement import Activations, Placement, State
from vdnn.planning.training.training import Training, TrainingMachine

_AGAIN = (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST)


def issued_ns(training: Training, machine: TrainingMachine, placement: Placement, copies: int) -> int:
    """`copies` are those of one step. 0 if nothing is known of the host: its figures of copies do not count then."""
    if not training.issue_ns:
        return 0
    found = training.issue_ns + copies * machine.link.issue_ns
    for unit, one in zip(training.units, placement.units, strict=True):
        if one.activations in _AGAIN:
            found += training.micro_batches * unit.forward_issue_ns
        if one.state is State.CPU and unit.gradient_bytes:
            found -= unit.step_issue_ns
    return found
