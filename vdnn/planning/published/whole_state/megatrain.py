"""MegaTrain: everything is on the host, each layer's parameters stream in, and its gradients stream out.

arXiv 2604.05091: two buffers of parameters, a recompute of each block in backward, gradients to the host at once, and
the optimizer on the CPU. The texts read do not say when forward goes on after the step; here each block waits only for
its own step, which is the fastest reading. One block is a checkpoint interval, and inputs stay on the device or, if
they do not fit, go to the host.
"""

from __future__ import annotations

from vdnn.planning.published.whole_state.fsdp2_offload import ALL_AWAY
from vdnn.planning.published.whole_state.placed_training import WholeStatePolicy, alike, checkpointed, first_that_fits
from vdnn.planning.training.placement import Activations, Placement
from vdnn.planning.training.training import Training, TrainingMachine


def place_megatrain(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    away = alike(training, ALL_AWAY)
    candidates = [checkpointed(training, away), checkpointed(training, away, Activations.RECOMPUTE_FROM_HOST)]
    return first_that_fits(training, machine, budget_bytes, candidates)


MEGATRAIN = WholeStatePolicy("megatrain", place_megatrain)
