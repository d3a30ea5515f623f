"""Placements in which the first units stay on the device with their state, and the others leave.

The first blocks move their activations: offloaded and recomputed ones alternate. The other blocks keep theirs. All of
it is in steps of an eighth of the units.
"""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.planning.training.placement import Activations, State, UnitPlacement
from vdnn.planning.training.training import Training

PARTS = 8


def spread(count: int, items: Sequence[int]) -> set[int]:
    """`count` of the items, evenly spaced."""
    size = len(items)
    return {items[min(size - 1, int((index + 0.5) * size / count))] for index in range(count)} if count else set()


def persistent_homes(training: Training, away: State) -> list[tuple[UnitPlacement, ...]]:
    """Activations are kept. Units that do not stay stream, and their state is at `away`."""
    count, found = len(training.units), []
    for part in range(PARTS + 1):
        stays = count * part // PARTS
        found.append(
            tuple(
                UnitPlacement() if index < stays else _away(unit.parameter_bytes > 0, unit.gradient_bytes > 0, away)
                for index, unit in enumerate(training.units)
            )
        )
    return list(dict.fromkeys(found))


def alternating_fates(training: Training, swapped: Activations, again: Activations) -> list[tuple[Activations, ...]]:
    """The fates of activations: `swapped` and `again` alternate in the blocks that come first."""
    blocks = [index for index, unit in enumerate(training.units) if unit.saved_bytes > unit.boundary_bytes]
    found = []
    for moved in range(PARTS + 1):
        for swaps in range(moved + 1):
            changed = blocks[: len(blocks) * moved // PARTS]
            chosen = spread(len(changed) * swaps // moved if moved else 0, changed)
            fates = dict.fromkeys(changed, again) | dict.fromkeys(chosen, swapped)
            found.append(tuple(fates.get(index, Activations.KEEP) for index in range(len(training.units))))
    return list(dict.fromkeys(found))


def with_fates(homes: Sequence[UnitPlacement], fates: Sequence[Activations]) -> tuple[UnitPlacement, ...]:
    """Units with the homes of one and the activations of the other."""
    return tuple(
        UnitPlacement(fate, one.streams, one.gradient_leaves, one.state) for one, fate in zip(homes, fates, strict=True)
    )


def _away(has_parameters: bool, is_trained: bool, state: State) -> UnitPlacement:
    if not is_trained:
        return UnitPlacement(streams=has_parameters)
    return UnitPlacement(streams=True, gradient_leaves=True, state=state)
