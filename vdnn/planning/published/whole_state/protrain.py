"""ProTrain: chunks of parameters are persistent or offloaded, blocks are swapped, checkpointed or kept.

Yang et al., MLSys 2026, arXiv 2406.08334: the first n_persist chunks stay on the device with their state and step
there; the others stream, and step on the CPU. n_swap blocks offload their activations, n_checkpoint are recomputed,
and the two alternate; the rest are kept, last. All settings that fit are compared by a model of their time, and the
fastest is taken. Here a chunk is a unit, n_buffer follows from the room, the settings are in steps of an eighth of the
units, and the model of time is: the longest of computing, each direction of the link, and the host's memory, with the
step on the CPU after backward. The fastest four by that are simulated. The paper overlaps the step on the CPU with
backward, where gradients are not clipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from vdnn.planning.published.whole_state.placed_training import WholeStatePolicy
from vdnn.planning.training.cycle import Cycle, cycle_of
from vdnn.planning.training.persistent_units import alternating_fates, persistent_homes, with_fates
from vdnn.planning.training.placement import Activations, Placement, State
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training, TrainingMachine

_SIMULATED = 4


def place_protrain(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    found = []
    for placement in _settings(training):
        cycle = cycle_of(training, placement)
        if max(cycle.needed_bytes) <= budget_bytes and cycle.host_bytes <= machine.host_bytes:
            found.append((_modelled_s(training, machine, cycle), placement))
    found.sort(key=lambda one: one[0])
    return min(
        (placement for _, placement in found[:_SIMULATED]),
        key=lambda one: simulate_training(training, machine, one, budget_bytes).step_ns,
        default=None,
    )


def _settings(training: Training) -> Iterator[Placement]:
    fates = alternating_fates(training, Activations.OFFLOAD, Activations.RECOMPUTE)
    for homes in persistent_homes(training, State.CPU):
        for one in fates:
            yield Placement(with_fates(homes, one))


def _modelled_s(training: Training, machine: TrainingMachine, cycle: Cycle) -> float:
    into, out = sum(move.nbytes for move in cycle.ins), sum(move.nbytes for move in cycle.outs)
    cpu_s = sum(training.units[unit].host_step_bytes for unit in cycle.cpu_steps) / machine.cpu_bytes_per_s
    copies_s = max(
        into / machine.link.to_device_bytes_per_s,
        out / machine.link.to_host_bytes_per_s,
        (into + out) / min(machine.link.duplex_bytes_per_s, machine.host_bytes_per_s),
    )
    return max(sum(task.duration_ns for task in cycle.tasks) / 1e9, copies_s) + cpu_s


PROTRAIN = WholeStatePolicy("protrain", place_protrain)
