"""Blocks of a step: its storages in the order of their saves, cut at some places. Of a block its inside is rebuilt.

What is kept is the last storage of a block, and whatever a rebuild in a later block reads: so every rebuild stays
inside its block, whatever branches run past its end.
"""

from __future__ import annotations

from collections.abc import Collection

from vdnn.planning.published.recomputed_steps import RebuiltSteps


class SaveBlocks:
    """Of one recording. `order` has all storages, as they were saved; a cut behind the i-th of them is called i."""

    def __init__(self, steps: RebuiltSteps, may_go: Collection[int] | None = None) -> None:
        self._lifetimes = steps.recording.lifetimes
        self.order = sorted(range(len(self._lifetimes)), key=lambda one: (self._lifetimes[one].saves[0], one))
        self._may_go = frozenset(steps.candidates if may_go is None else may_go)

    def bytes_between(self, first: int, last: int) -> int:
        return sum(self._lifetimes[self.order[place]].nbytes for place in range(first, last + 1))

    def cuts_of(self, block_bytes: int) -> frozenset[int]:
        """A block ends as soon as so much was saved in it."""
        cuts, held = set(), 0
        for place, index in enumerate(self.order):
            held += self._lifetimes[index].nbytes
            if held >= block_bytes:
                cuts.add(place)
                held = 0
        return frozenset(cuts)

    def inside(self, cuts: Collection[int]) -> set[int]:
        """What is given up, with these cuts. The last storage of all ends the last block."""
        block_of, inside, number, last = {}, set(), 0, len(self.order) - 1
        for place, index in enumerate(self.order):
            block_of[index] = number
            if place in cuts or place == last:
                number += 1
            elif index in self._may_go:
                inside.add(index)
        for index in sorted(inside, key=lambda one: -block_of[one]):
            rebuild = self._lifetimes[index].rebuild
            if rebuild is not None and index in inside:
                inside -= {one for one in rebuild.inputs if block_of[one] != block_of[index]}
        return inside
