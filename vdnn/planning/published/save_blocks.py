"""Cuts the storages of a step, in the order of their saves, into blocks. The inside of a block is recomputed.

The last storage of a block is kept, and so is everything that a recompute in a later block reads. So every recompute
stays inside its block, even if branches run past the end of the block.
"""

from __future__ import annotations

from collections.abc import Collection

from vdnn.planning.published.recomputed_steps import RecomputedSteps


class SaveBlocks:
    """The blocks of one recording. `order` has all storages in the order of their saves; cut i is after `order[i]`.
    `may_discard`: the storages that may be recomputed, by default all candidates of `steps`."""

    def __init__(self, steps: RecomputedSteps, may_discard: Collection[int] | None = None) -> None:
        self._lifetimes = steps.recording.lifetimes
        self.order = sorted(range(len(self._lifetimes)), key=lambda one: (self._lifetimes[one].saves[0], one))
        self._may_discard = frozenset(steps.candidates if may_discard is None else may_discard)

    def bytes_between(self, first: int, last: int) -> int:
        return sum(self._lifetimes[index].nbytes for index in self.order[first : last + 1])

    def cuts_of(self, block_bytes: int) -> frozenset[int]:
        """The cuts of blocks that end as soon as `block_bytes` are saved in them."""
        cuts, held = set(), 0
        for cut, index in enumerate(self.order):
            held += self._lifetimes[index].nbytes
            if held >= block_bytes:
                cuts.add(cut)
                held = 0
        return frozenset(cuts)

    def inside(self, cuts: Collection[int]) -> set[int]:
        """The storages that are recomputed with these cuts. The last storage of all ends the last block."""
        block_of, inside, number, last = {}, set(), 0, len(self.order) - 1
        for cut, index in enumerate(self.order):
            block_of[index] = number
            if cut in cuts or cut == last:
                number += 1
            elif index in self._may_discard:
                inside.add(index)
        for index in sorted(inside, key=lambda one: -block_of[one]):
            recompute = self._lifetimes[index].recompute
            if recompute is not None and index in inside:
                inside -= {one for one in recompute.inputs if block_of[one] != block_of[index]}
        return inside
