"""torchao's CPUOffloadOptimizer with `offload_gradients`: a step on the CPU for each parameter, in step().

pytorch/ao, `torchao/optim/cpu_offload.py`: hooks copy each gradient to the host and free it; step() waits for it, steps
on the CPU, and copies the parameter back; it returns when all are back. torchao refuses to clip gradients, so its own
training begins no CPU step before step() either, and takes as long as here. Parameters that are too small to offload
are not in this model. Activations are kept or checkpointed on the device.
"""

from __future__ import annotations

from vdnn.planning.published.whole_state.placed_training import (
    WholeStatePolicy,
    alike,
    first_that_fits,
    with_or_without_checkpoints,
)
from vdnn.planning.published.whole_state.zero_offload import ON_CPU
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.training import Training, TrainingMachine


def place_torchao_offload(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    resident = alike(training, ON_CPU, forward_waits_for_steps=True)
    return first_that_fits(training, machine, budget_bytes, with_or_without_checkpoints(training, resident))


TORCHAO_OFFLOAD = WholeStatePolicy("torchao-offload", place_torchao_offload)
