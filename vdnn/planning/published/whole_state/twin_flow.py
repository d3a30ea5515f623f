"""Twin-Flow of ZeRO-Offload++: a ratio of the optimizer steps on the CPU, the rest on the device.

DeepSpeed, blog "ZeRO-Offload++" (2023) and `runtime/zero/stage3.py`: the last sub-groups, as many as the ratio says,
are on the CPU, and the others keep their state on the device. The user sets the ratio. Here it is the lowest of 0.0,
0.1 to 1.0 that fits, with activations kept or checkpointed, whichever is faster.
"""

from __future__ import annotations

from vdnn.planning.published.whole_state.placed_training import (
    WholeStatePolicy,
    first_that_fits,
    with_or_without_checkpoints,
)
from vdnn.planning.published.whole_state.zero_offload import ON_CPU
from vdnn.planning.training.placement import Placement, UnitPlacement
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training, TrainingMachine

_RATIOS = 10


def place_twin_flow(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    trained = [index for index, unit in enumerate(training.units) if unit.gradient_bytes]
    kept, recomputed = [], []
    for tenths in range(_RATIOS + 1):
        on_cpu = set(trained[len(trained) * (_RATIOS - tenths) // _RATIOS :])
        units = tuple(ON_CPU if index in on_cpu else UnitPlacement() for index in range(len(training.units)))
        first, second = with_or_without_checkpoints(training, Placement(units, forward_waits_for_steps=True))
        kept.append(first)
        recomputed.append(second)
    found = [first_that_fits(training, machine, budget_bytes, ones) for ones in (kept, recomputed)]
    return min(
        (one for one in found if one is not None),
        key=lambda one: simulate_training(training, machine, one, budget_bytes).step_ns,
        default=None,
    )


TWIN_FLOW = WholeStatePolicy("twin-flow", place_twin_flow)
