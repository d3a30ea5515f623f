"""Rechecks: in some steps, recomputed or decoded storages are compared with hashes of the discarded ones.

[Note: Which steps] Each discarded storage is hashed on the device before it is discarded and after it is recomputed, as
in integrity mode. This happens in one random (seeded) step of every `one_in`, and the first two times that a recipe is
used for a save key and size. So a recipe that is wrong for any save key in every step is found within twice `one_in`
steps. The hashes are read before an optimizer runs, and at the end of the step. A difference raises RecomputeError, and
the recipe is not used again in this process.

Where a trial holds for all sizes (docs/decisions/0082), the first 16 saves of a form are checked in this way, whatever
their sizes. From then on a new size is checked at the first two saves that have the same signature, in any layer: only
an error of the operation at that size is left to find.

[Note: Cost of rechecks] A checked step costs two passes over the discarded bytes, a wait for the device before the
optimizer, and 16 bytes for each storage. Other steps cost nothing.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from vdnn import _C
from vdnn.errors import RecomputeError
from vdnn.runtime.recompute.proofs import Recent, disabled_recipes
from vdnn.runtime.storage.integrity import HashPairs
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.step.recording import SaveKey

DEFAULT_ONE_IN = 64
_FIRST = 2  # times that a recipe is checked for a save key when it is new
_FIRST_OF_A_FORM = 16  # the same for a save of any size
BYTES_A_STORAGE = 16  # two hashes, in a checked step


class _Recomputed(NamedTuple):
    label: str
    recipe: str


class Check:
    """The hash of a discarded storage, to compare with the recomputed one."""

    __slots__ = ("_before", "_pairs", "_tag")

    def __init__(self, pairs: HashPairs[_Recomputed], tag: _Recomputed, before: torch.Tensor) -> None:
        self._pairs = pairs
        self._tag = tag
        self._before = before

    def compare(self, address: int, nbytes: int, stream: _C.Stream) -> None:
        """Compares it with the recomputed bytes, ordered on `stream`."""
        self._pairs.compare(self._tag, self._before, address, nbytes, stream)


class Rechecks:
    """The rechecks of one session. `one_in` 0 turns them off."""

    def __init__(self, one_in: int = DEFAULT_ONE_IN, failed: Callable[[], object] = lambda: None) -> None:
        """`failed` is called before an error is raised."""
        self._one_in = one_in
        self._failed = failed
        self._random = random.Random(0)
        # How often each was checked as new: by signature and save key, by signature, and by its key without sizes.
        self._followed: Recent[Hashable, int] = Recent()
        self._verified: dict[str, int] = {}  # the last step in which a recipe was right
        self._pairs: weakref.WeakKeyDictionary[Transport, HashPairs[_Recomputed]] = weakref.WeakKeyDictionary()
        self._step = 0
        self._next = self._one_of_window(0)
        self.is_checking = self._next == 0

    @property
    def compared(self) -> int:
        return sum(pairs.compared for pairs in self._pairs.values())

    @property
    def failed(self) -> int:
        return sum(pairs.failed for pairs in self._pairs.values())

    def find_faults(self, transport: Transport) -> bool:
        """True if a recipe that is wrong at a save is found when it is followed there for the first time, or if there
        are no values that could be wrong."""
        if transport.fake or transport.integrity is not None:
            return True
        return self._one_in > 0 and transport.has_kernels

    def are_due(
        self, transport: Transport, signature: Hashable, save_key: SaveKey | None, shapeless: Hashable | None = None
    ) -> bool:
        """True if the storage that this recipe recomputes for this save has to be compared. `shapeless` identifies
        recipe and save without sizes, if sizes do not count."""
        if not self._one_in or transport.fake or transport.integrity is not None or not transport.has_kernels:
            return False
        return self.is_checking or self._is_new(signature, save_key, shapeless)

    def _is_new(self, signature: Hashable, save_key: SaveKey | None, shapeless: Hashable | None) -> bool:
        if self._times((signature, save_key)) >= _FIRST:
            return False
        is_new_form = shapeless is None or self._times(shapeless) < _FIRST_OF_A_FORM
        return is_new_form or self._times((signature,)) < _FIRST

    def _times(self, key: Hashable) -> int:
        return self._followed.get(key) or 0

    def check(
        self,
        managed: ManagedStorage,
        recipe: str,
        signature: Hashable,
        save_key: SaveKey | None,
        shapeless: Hashable | None = None,
    ) -> Check | None:
        """A check of a storage that is about to be discarded; None if this step does not check it."""
        transport = managed.transport
        if not self.are_due(transport, signature, save_key, shapeless):
            return None
        pairs = self._pairs.get(transport)
        if pairs is None:
            pairs = self._pairs[transport] = HashPairs(transport)
        try:
            before = pairs.hash(managed.facts.address, managed.nbytes, transport.current_stream())
        except torch.OutOfMemoryError:
            return None
        if self._is_new(signature, save_key, shapeless):
            for key in ((signature, save_key), (signature,), shapeless):
                if key is not None:
                    self._followed[key] = self._times(key) + 1
        label = managed.facts.label
        return Check(pairs, _Recomputed(label if save_key is None else f"{label} ({save_key})", recipe), before)

    def lines(self) -> list[str]:
        """The lines of the report."""
        if not self.compared:
            return []
        return [f"  rechecks: {self.compared} storages compared with what was discarded, {self.failed} differ"]

    def finish(self) -> None:
        """Blocks until all comparisons so far are done, if there are any. Raises RecomputeError if two hashes
        differ."""
        if not self._pairs:
            return
        for pairs in list(self._pairs.values()):
            compared, wrong = pairs.differing()
            if wrong:
                disabled_recipes.update(one.recipe for one in wrong)
                self._failed()
                first = wrong[0]
                since = self._verified.get(first.recipe, -1) + 1
                raise RecomputeError(
                    storages=len(wrong), first=first.label, recipe=first.recipe, step=self._step, since=since
                )
            self._verified.update((one.recipe, self._step) for one in compared)

    def step_ended(self) -> None:
        """Finishes the comparisons, and decides whether the next step is checked. See [Note: Which steps]."""
        self.finish()
        self._step += 1
        if not self._one_in:
            return
        if self._step % self._one_in == 0:
            self._next = self._one_of_window(self._step)
        self.is_checking = self._step == self._next

    def _one_of_window(self, begin: int) -> int:
        return begin + self._random.randrange(self._one_in) if self._one_in else -1
