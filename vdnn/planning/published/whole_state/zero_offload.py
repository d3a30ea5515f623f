"""ZeRO-Offload: parameters stay on the device, gradients leave as they are made, and the optimizer steps on the CPU.

Ren et al., USENIX ATC 2021, arXiv 2101.06840, sections 3 and 5. The step begins when backward has ended, because the
norm of the gradients is known only then, and the next forward when all parameters are back. With delayed parameter
updates, the step on the CPU runs beside the next forward and backward, which compute with parameters of one step
before. Checkpointed inputs may be on the host (DeepSpeed's `cpu_checkpointing`).
"""

from __future__ import annotations

from collections.abc import Iterator

from vdnn.planning.published.whole_state.placed_training import (
    WholeStatePolicy,
    alike,
    checkpointed,
    first_that_fits,
    with_or_without_checkpoints,
)
from vdnn.planning.training.placement import Activations, Placement, State, UnitPlacement
from vdnn.planning.training.training import Training, TrainingMachine

ON_CPU = UnitPlacement(gradient_leaves=True, state=State.CPU)


def place_zero_offload(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    return first_that_fits(
        training, machine, budget_bytes, _candidates(training, alike(training, ON_CPU, forward_waits_for_steps=True))
    )


def place_zero_offload_delayed(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    return first_that_fits(
        training, machine, budget_bytes, _candidates(training, alike(training, ON_CPU, delayed_update=True))
    )


def _candidates(training: Training, placement: Placement) -> Iterator[Placement]:
    yield from with_or_without_checkpoints(training, placement)
    yield checkpointed(training, placement, Activations.RECOMPUTE_FROM_HOST)


ZERO_OFFLOAD = WholeStatePolicy("zero-offload", place_zero_offload)
ZERO_OFFLOAD_DELAYED = WholeStatePolicy("zero-offload-delayed", place_zero_offload_delayed, is_another_training=True)
