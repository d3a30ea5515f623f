"""The placement with the least on the device, the one with little on the host, and the largest model that fits.

least_placement() leaves nothing on the device that may be elsewhere. fitting_placement() then brings units back to the
device while the budget lasts, so that the host holds less: a training that has one fits. It is found in no time, and is
a start for the search of auto_placement.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.planning.training.cycle import Cycle, cycle_of
from vdnn.planning.training.placement import Activations, Placement, State, UnitPlacement
from vdnn.planning.training.training import Training, Unit

_SLICE_BYTES = 128 << 20
MOST_LAYERS = 256  # that are looked for


def least_placement(training: Training) -> Placement:
    """Everything leaves. Activations are recomputed from inputs on the host."""
    return Placement(tuple(_away(unit) for unit in training.units), slice_bytes=_SLICE_BYTES)


def least_training_bytes(training: Training) -> int:
    """The least memory of the device with which the training runs."""
    return max(cycle_of(training, least_placement(training)).needed_bytes)


def fitting_placement(training: Training, budget_bytes: int, host_bytes: int) -> Placement | None:
    """A placement within both, or None if none was found. See fitting_host_bytes()."""
    placement, cycle = _little_on_host(training, budget_bytes)
    fits = max(cycle.needed_bytes) <= budget_bytes and cycle.host_bytes <= host_bytes
    return placement if fits else None


def fitting_host_bytes(training: Training, budget_bytes: int) -> int:
    """The memory of the host that is enough under this budget."""
    return _little_on_host(training, budget_bytes)[1].host_bytes


def with_layers(training: Training, blocks: tuple[int, ...], layers: int) -> Training:
    """The same training with another number of its repeated blocks: the middle one is repeated, or left out."""
    if not blocks or layers < 1:
        return training
    middle = blocks[len(blocks) // 2]
    units: list[Unit] = []
    more = layers - len(blocks)
    dropped = set(sorted(blocks, key=lambda index: (abs(index - middle), index))[: max(0, -more)])
    for index, unit in enumerate(training.units):
        if index not in dropped:
            units.append(unit)
        if index == middle:
            units += [replace(training.units[middle], name=f"{unit.name} (repeated {i + 1})") for i in range(more)]
    return replace(training, units=tuple(units))


def largest_layers(training: Training, blocks: tuple[int, ...], budget_bytes: int, host_bytes: int) -> int:
    """The most repeated blocks with which the training fits both, 0 if not even one does."""
    fits, over = 0, MOST_LAYERS + 1
    layers = max(1, min(len(blocks), MOST_LAYERS)) if blocks else MOST_LAYERS
    while fits + 1 < over:
        if fitting_placement(with_layers(training, blocks, layers), budget_bytes, host_bytes) is not None:
            fits = layers
        else:
            over = layers
        layers = min(2 * fits, MOST_LAYERS) if over > MOST_LAYERS else (fits + over) // 2
    return fits


def _away(unit: Unit) -> UnitPlacement:
    fate = Activations.RECOMPUTE_FROM_HOST if unit.saved_bytes else Activations.KEEP
    learns = unit.gradient_bytes > 0
    return UnitPlacement(fate, unit.parameter_bytes > 0, learns, State.HOST if learns else State.DEVICE)


def _little_on_host(training: Training, budget_bytes: int) -> tuple[Placement, Cycle]:
    """Brings back, in this order, inputs of recomputes, state, gradients and parameters: of each group of equal units
    as many as have room."""
    placement = least_placement(training)
    cycle = cycle_of(training, placement)
    groups: dict[object, list[int]] = {}
    for index, unit in enumerate(training.units):
        groups.setdefault(replace(unit, name=""), []).append(index)
    for change in (_keep_input, _keep_state, _keep_gradient, _keep_parameters):
        for members in groups.values():
            fits, over = 0, len(members) + 1
            count = len(members) if change(placement.units[members[0]]) != placement.units[members[0]] else 0
            best = placement, cycle
            while count and fits + 1 < over:
                units = list(placement.units)
                for index in members[:count]:
                    units[index] = change(units[index])
                tried = replace(placement, units=tuple(units))
                found = cycle_of(training, tried)
                if max(found.needed_bytes) <= budget_bytes and found.host_bytes <= cycle.host_bytes:
                    fits, best = count, (tried, found)
                else:
                    over = count
                count = (fits + over) // 2
            placement, cycle = best
    return placement, cycle


def _keep_input(one: UnitPlacement) -> UnitPlacement:
    from_host = one.activations is Activations.RECOMPUTE_FROM_HOST
    return replace(one, activations=Activations.RECOMPUTE) if from_host else one


def _keep_state(one: UnitPlacement) -> UnitPlacement:
    return replace(one, state=State.DEVICE)


def _keep_gradient(one: UnitPlacement) -> UnitPlacement:
    return replace(one, gradient_leaves=False)


def _keep_parameters(one: UnitPlacement) -> UnitPlacement:
    return replace(one, streams=False)
