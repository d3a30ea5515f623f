"""TrainStream's planner: as many blocks resident as fit beside a window and a reserve, the rest evenly spread.

TrainStream 0.4.1 (PyPI), `planner.py`, `wrapper.py`: a tenth of the memory is left free. If all blocks fit with a
reserve of 15 % or twice the bytes in flight, nothing is paged and activations stay. Otherwise a window of three blocks
and the reserve are set aside, as many blocks as fit are resident, the others stream, spread evenly, and activations
are paged. Then measured peaks move blocks in or out, until a step is near the target; so is it here, with the bytes
that the placement needs. All gradients leave and AdamW runs on the host. Where the host is too small for the
activations, blocks are checkpointed, which is the user's to do, and their inputs are paged.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.planning.published.whole_state.fsdp2_offload import ALL_AWAY
from vdnn.planning.published.whole_state.placed_training import WholeStatePolicy, fits
from vdnn.planning.published.whole_state.zero_offload import ON_CPU
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.persistent_units import spread
from vdnn.planning.training.placement import Activations, Placement, UnitPlacement
from vdnn.planning.training.training import Training, TrainingMachine

_MARGIN = 0.10
_RESERVE = 0.15
_WINDOW_BLOCKS = 3
_MOST_IN_FLIGHT = 1 << 30
_REFINED_STEPS = 8


def place_trainstream(training: Training, machine: TrainingMachine, budget_bytes: int) -> Placement | None:
    blocks = [index for index, unit in enumerate(training.units) if unit.saved_bytes > unit.boundary_bytes]
    sizes = [training.units[index].parameter_bytes for index in blocks]
    target, largest = int(budget_bytes * (1 - _MARGIN)), max(sizes)
    in_flight = min(_MOST_IN_FLIGHT, budget_bytes // 10)
    fixed = sum(unit.parameter_bytes for unit in training.units) - sum(sizes) + in_flight
    reserve = max(2 * in_flight, int(_RESERVE * target))
    paged = len(blocks)
    if fixed + sum(sizes) + reserve <= target:
        paged = 0
    else:
        room = target - fixed - _WINDOW_BLOCKS * largest - reserve
        paged -= max(0, min(len(blocks) - 1, room // largest))
    placement = _placed(training, blocks, paged, pages_activations=paged > 0)
    for _ in range(_REFINED_STEPS):
        peak = max(cycle_of(training, placement).needed_bytes)
        if peak > target + budget_bytes // 20 and paged < len(blocks):
            paged += min(len(blocks) - paged, max(1, -(-(peak - target) // largest)))
        elif paged and peak + 1.5 * largest < target and (target - peak) // largest > 1:
            paged -= min(paged, (target - peak) // largest - 1)
        else:
            break
        placement = _placed(training, blocks, paged, pages_activations=True)
    everything = _placed(training, blocks, len(blocks), pages_activations=True)
    for last in (placement, everything, *(_with_paged_inputs(one) for one in (placement, everything))):
        if fits(training, machine, budget_bytes, last):
            return last
    return None


def _with_paged_inputs(placement: Placement) -> Placement:
    """Blocks checkpointed by the user, with their inputs paged: where activations do not fit the host."""
    units = tuple(
        replace(one, activations=Activations.RECOMPUTE_FROM_HOST) if one.activations is Activations.OFFLOAD else one
        for one in placement.units
    )
    return replace(placement, units=units)


def _placed(training: Training, blocks: list[int], paged: int, *, pages_activations: bool) -> Placement:
    away, among = spread(paged, blocks), set(blocks)
    fate = Activations.OFFLOAD if pages_activations else Activations.KEEP
    units = []
    for index, unit in enumerate(training.units):
        one = ON_CPU if unit.gradient_bytes else UnitPlacement()
        units.append(
            UnitPlacement(
                fate if index in among else Activations.KEEP,
                ALL_AWAY.streams and index in away,
                one.gradient_leaves,
                one.state,
            )
        )
    return Placement(tuple(units))


TRAINSTREAM = WholeStatePolicy("trainstream", place_trainstream)
