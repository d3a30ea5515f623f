"""Proof does not end: what was recomputed or decoded is compared with what was discarded, again and again.

[Note: Which steps] Everything that is discarded is hashed on the device before it goes and after it is recomputed, as
integrity mode does, in one step of every `one_in` (a random, seeded one), and at each place the first two times that a
recipe is followed there. So a recipe that is wrong at any place in every step is found within twice `one_in` steps. The
hashes are read before an optimizer runs, and at the end of the step. A difference raises RecomputeError, and the recipe
is followed nowhere in this process any more.

[Note: The cost] In a step that is checked: two passes over what is discarded, a wait for the device before the
optimizer, and 16 bytes a storage. In others: nothing.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Hashable
from typing import NamedTuple

import torch

from vdnn import _C
from vdnn.errors import KernelUnavailableError, RecomputeError
from vdnn.runtime.recompute.proofs import Recent, disabled_recipes
from vdnn.runtime.storage.geometry import label_text
from vdnn.runtime.storage.integrity import HashPairs
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.step.recording import SaveKey

DEFAULT_ONE_IN = 64
_FIRST = 2  # times that a recipe is checked at each place when it is new there
BYTES_A_STORAGE = 16  # two hashes, in a step that is checked


class _Recomputed(NamedTuple):
    label: str
    recipe: str


class Check:
    """Of one storage that was discarded."""

    __slots__ = ("_left", "_pairs", "_tag")

    def __init__(self, pairs: HashPairs[_Recomputed], tag: _Recomputed, left: torch.Tensor) -> None:
        self._pairs = pairs
        self._tag = tag
        self._left = left

    def compare(self, address: int, nbytes: int, stream: _C.Stream) -> None:
        """With what was recomputed, as `stream` sees it."""
        self._pairs.compare(self._tag, self._left, address, nbytes, stream)


class Rechecks:
    """Of one session. `one_in` 0: none at all."""

    def __init__(self, one_in: int = DEFAULT_ONE_IN, seed: int = 0) -> None:
        self._one_in = one_in
        self._random = random.Random(seed)
        self._followed: Recent[Hashable, int] = Recent()  # how often, at each place
        self._verified: dict[str, int] = {}  # by recipe, the last step in which all was well
        self._pairs: weakref.WeakKeyDictionary[Transport, HashPairs[_Recomputed]] = weakref.WeakKeyDictionary()
        self._step = 0
        self._next = self._one_of_window(0)
        self._is_checking = self._next == 0

    @property
    def compared(self) -> int:
        return sum(pairs.compared for pairs in self._pairs.values())

    @property
    def failed(self) -> int:
        return sum(pairs.failed for pairs in self._pairs.values())

    def check(self, managed: ManagedStorage, recipe: str, signature: Hashable, place: SaveKey | None) -> Check | None:
        """Of a storage that is about to be discarded; None where this step does not check it."""
        transport = managed.transport
        if not self._one_in or transport.fake or transport.integrity is not None:
            return None
        times = self._followed.get((signature, place)) or 0
        if times < _FIRST:
            self._followed[(signature, place)] = times + 1
        elif not self._is_checking:
            return None
        pairs = self._pairs.get(transport)
        if pairs is None:
            pairs = self._pairs[transport] = HashPairs(transport)
        try:
            left = pairs.hash(managed.address, managed.nbytes, transport.current_stream())
        except KernelUnavailableError:
            self._one_in = 0  # vdnn doctor says that this build has no device code
            return None
        label = label_text(managed.geometry, managed.saved_in)
        return Check(pairs, _Recomputed(label if place is None else f"{label} ({place})", recipe), left)

    def lines(self) -> list[str]:
        """For the report."""
        if not self.compared:
            return []
        return [f"  rechecks: {self.compared} storages compared with what was discarded, {self.failed} differ"]

    def finish(self) -> None:
        """Blocks until all comparisons so far are done, if there are any; raises what they show."""
        for pairs in list(self._pairs.values()):
            compared, wrong = pairs.differing()
            if wrong:
                disabled_recipes.update(one.recipe for one in wrong)
                first = wrong[0]
                since = self._verified.get(first.recipe, -1) + 1
                raise RecomputeError(
                    storages=len(wrong), first=first.label, recipe=first.recipe, step=self._step, since=since
                )
            self._verified.update((one.recipe, self._step) for one in compared)

    def step_ended(self) -> None:
        """See [Note: Which steps]."""
        self.finish()
        self._step += 1
        if not self._one_in:
            return
        if self._step % self._one_in == 0:
            self._next = self._one_of_window(self._step)
        self._is_checking = self._step == self._next

    def _one_of_window(self, begin: int) -> int:
        return begin + self._random.randrange(self._one_in) if self._one_in else -1
