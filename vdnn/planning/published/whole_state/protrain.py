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

from vdnn.planning.published.whole_state.fsdp2_offload import ALL_AWAY
from vdnn.planning.published.whole_state.placed_training import WholeStatePolicy, fits, spread
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import Activations, Placement, UnitPlacement
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training, TrainingMachine

_PARTS = 8
_SIMULATED = 4


def place_protrain(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    found = sorted(
        (one for one in _settings(training) if fits(training, machine, budget_bytes, one)),
        key=lambda one: _modelled_s(training, machine, one),
    )
    return min(
        found[:_SIMULATED],
        key=lambda one: simulate_training(training, machine, one, budget_bytes).step_ns,
        default=None,
    )


def _settings(training: Training) -> Iterator[Placement]:
    units, blocks = (
        training.units,
        [i for i, unit in enumerate(training.units) if unit.saved_bytes > unit.boundary_bytes],
    )
    for persistent in range(_PARTS + 1):
        for moved in range(_PARTS + 1):
            for swapped in range(moved + 1):
                stays = len(units) * persistent // _PARTS
                changed = blocks[: len(blocks) * moved // _PARTS]
                swaps = spread(len(changed) * swapped // moved if moved else 0, changed)
                fates = dict.fromkeys(changed, Activations.RECOMPUTE) | dict.fromkeys(swaps, Activations.OFFLOAD)
                yield Placement(
                    tuple(
                        _unit(fates.get(index, Activations.KEEP), index < stays, unit.gradient_bytes > 0)
                        for index, unit in enumerate(units)
                    )
                )


def _unit(fate: Activations, is_persistent: bool, is_trained: bool) -> UnitPlacement:
    if is_persistent:
        return UnitPlacement(fate)
    return (
        UnitPlacement(fate, True, ALL_AWAY.gradient_leaves, ALL_AWAY.state) if is_trained else UnitPlacement(fate, True)
    )


def _modelled_s(training: Training, machine: TrainingMachine, placement: Placement) -> float:
    cycle = cycle_of(training, placement)
    into, out = sum(move.nbytes for move in cycle.ins), sum(move.nbytes for move in cycle.outs)
    cpu_s = sum(training.units[unit].host_step_bytes for unit in cycle.cpu_steps) / machine.cpu_bytes_per_s
    copies_s = max(
        into / machine.link.to_device_bytes_per_s,
        out / machine.link.to_host_bytes_per_s,
        (into + out) / min(machine.link.duplex_bytes_per_s, machine.host_bytes_per_s),
    )
    return max(sum(task.duration_ns for task in cycle.tasks) / 1e9, copies_s) + cpu_s


PROTRAIN = WholeStatePolicy("protrain", place_protrain)
