"""FSDP2's CPUOffloadPolicy: all parameters, gradients and states are on the host, and the optimizer steps there.

pytorch, `torch/distributed/fsdp/_fully_shard/_fsdp_api.py`: sharded parameters, gradients and states are on the CPU,
and parameters are copied to the device before their all-gather, for forward and again for backward. All or nothing.
The optimizer is the user's and runs when backward has ended; forward begins when it returns. Activations are kept or
checkpointed on the device.
"""

from __future__ import annotations

from vdnn.planning.published.whole_state.placed_training import (
    WholeStatePolicy,
    alike,
    first_that_fits,
    with_or_without_checkpoints,
)
from vdnn.planning.training.placement import Placement, State, UnitPlacement
from vdnn.planning.training.training import Training, TrainingMachine

ALL_AWAY = UnitPlacement(streams=True, gradient_leaves=True, state=State.CPU)


def place_fsdp2_offload(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    away = alike(training, ALL_AWAY, forward_waits_for_steps=True)
    return first_that_fits(training, machine, budget_bytes, with_or_without_checkpoints(training, away))


FSDP2_OFFLOAD = WholeStatePolicy("fsdp2-offload", place_fsdp2_offload)
