"""The parts that published policies of whole trainings share: their signature, and which placements fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import Activations, Placement, UnitPlacement
from vdnn.planning.training.training import Training, TrainingMachine

PlaceTraining = Callable[[Training, TrainingMachine, int], "Placement | None"]


@dataclass(frozen=True, slots=True)
class WholeStatePolicy:
    """A system's rules. `place` returns its placement under a budget, or None if the system does not fit.
    `is_another_training`: its parameters are those of one step earlier."""

    name: str
    place: PlaceTraining
    is_another_training: bool = False


def fits(training: Training, machine: TrainingMachine, budget_bytes: int, placement: Placement) -> bool:
    cycle = cycle_of(training, placement)
    return max(cycle.needed_bytes) <= budget_bytes and cycle.host_bytes <= machine.host_bytes


def first_that_fits(
    training: Training, machine: TrainingMachine, budget_bytes: int, placements: Iterable[Placement]
) -> Placement | None:
    return next((one for one in placements if fits(training, machine, budget_bytes, one)), None)


def checkpointed(training: Training, placement: Placement, fate: Activations = Activations.RECOMPUTE) -> Placement:
    """The placement with every unit recomputed that saves more than its input, as systems checkpoint each block."""
    units = tuple(
        replace(one, activations=fate) if unit.saved_bytes > unit.boundary_bytes else one
        for unit, one in zip(training.units, placement.units, strict=True)
    )
    return replace(placement, units=units)


def with_or_without_checkpoints(training: Training, placement: Placement) -> Iterator[Placement]:
    """Activations kept, if that fits, and otherwise each block checkpointed: what a user of the system would do."""
    yield placement
    yield checkpointed(training, placement)


def alike(
    training: Training, unit: UnitPlacement, *, forward_waits_for_steps: bool = False, delayed_update: bool = False
) -> Placement:
    return Placement(
        with_parameters(training, unit), forward_waits_for_steps=forward_waits_for_steps, delayed_update=delayed_update
    )


def with_parameters(training: Training, unit: UnitPlacement) -> tuple[UnitPlacement, ...]:
    """`unit` for all units, as far as they have parameters that train or move."""
    return tuple(
        replace(unit, streams=unit.streams and one.parameter_bytes > 0)
        if one.gradient_bytes
        else _frozen(unit, one.parameter_bytes)
        for one in training.units
    )


def _frozen(unit: UnitPlacement, parameter_bytes: int) -> UnitPlacement:
    return UnitPlacement(unit.activations, unit.streams and parameter_bytes > 0)
