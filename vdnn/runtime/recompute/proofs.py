"""What a session knows of recipes: whether each came out right where it is to be followed, and what it costs there.

[Note: Proven where it is followed] Before a recipe replaces a value it is tried on one that is there, and compared byte
for byte: at the save, at every place of the step at which it is to be used. In a step that follows no plan it is tried
again at the first use of what it makes, with operands and flags as they are then. So a program that writes to an
operand between the two in every step, in whatever way, has no recipe there. One that differs is not followed at that
place again, and that is said once.

Operations, scalars, shapes, strides, dtypes and backend flags are what a recipe's signature says; what a program writes
behind autograd's back leaves no trace in the graph. Where no steps are watched there are no places, and every value is
compared. Tensors without data cannot be compared: there recipes are believed, and only their cost is found out. What
changes in some steps only is found by rechecks (rechecks.py). Who names a tolerance has values followed that come out
within it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch

from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute import Recipe, UnknownLayoutError
from vdnn.runtime.recompute.codecs import Codec
from vdnn.runtime.recompute.recompute_cost import Proof
from vdnn.runtime.recompute.tolerance import Tolerance, difference_between
from vdnn.runtime.recompute.trial import Trial, bytes_of, is_as_it_was
from vdnn.runtime.storage.geometry import label_text
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.recording import SaveKey

logger = logging.getLogger("vdnn")

_MOST_KNOWN = 8192  # a scalar that changes at every step makes a new signature each time

# Recipes of which a recheck found, anywhere in this process, that they do not make what was there.
disabled_recipes: set[str] = set()

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Place = tuple[Hashable, SaveKey]  # of a trial: the signature, and where


class Outcome(Enum):
    """Of a trial."""

    EXACT = "bit for bit"
    CLOSE = "within the tolerance"
    WRONG = "neither"
    UNKNOWN = "could not be compared this time"


class Recent(Generic[Key, Value]):
    """A dictionary that forgets what was asked for the longest time ago."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._most = most

    def get(self, key: Key) -> Value | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)


class Known(NamedTuple):
    """What was found out at a place, and what it costs there."""

    outcome: Outcome
    cost: Proof


class Proofs:
    """Of one session."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._costs: Recent[Hashable, Proof] = Recent()  # by signature
        self._outcomes: Recent[Place, Outcome] = Recent()
        self._said: Recent[str, bool] = Recent(256)

    def __len__(self) -> int:
        """How much is remembered."""
        return len(self._costs) + len(self._outcomes)

    def known(self, signature: Hashable, place: SaveKey | None, *, is_fake: bool) -> Known | None:
        """None if it has to be tried."""
        cost = self._costs.get(signature)
        outcome = Outcome.EXACT if is_fake else None if place is None else self._outcomes.get((signature, place))
        return None if cost is None or outcome is None else Known(outcome, cost)

    def cost(self, recipe: Recipe | Codec) -> Proof:
        """Of one that was tried, and came out."""
        found = self._costs.get(recipe.signature)
        if found is None:
            raise RuntimeError(f"the cost of {recipe.name} is asked for, and it was not tried")
        return found

    # See [Note: Proven where it is followed].

    def at_save(
        self, managed: ManagedStorage, recipe: Recipe | Codec, place: SaveKey | None, gauges: Gauges | None
    ) -> Outcome:
        """While the original is on the device; tried once for each place."""
        if recipe.name in disabled_recipes:
            return Outcome.WRONG
        key = None if place is None else (recipe.signature, place)
        known = None if key is None else self._outcomes.get(key)
        if known is Outcome.WRONG or (known is not None and self._costs.get(recipe.signature) is not None):
            return known
        source = managed.source_storage
        outcome = self._tried(managed, recipe, None if source is None else (source, 0), gauges)
        if key is not None and outcome is not Outcome.UNKNOWN:
            self._outcomes[key] = outcome
        return outcome

    def at_use(
        self,
        managed: ManagedStorage,
        recipe: Recipe | None,
        place: Place | None,
        original: tuple[torch.UntypedStorage, int],
        gauges: Gauges | None,
    ) -> bool:
        """Whether it comes out when it would be followed. `recipe` None: an operand is gone by then. `original` says
        in which storage the bytes are now, and where they begin."""
        outcome = Outcome.UNKNOWN if recipe is None else self._tried(managed, recipe, original, gauges, is_quiet=True)
        is_right = outcome in (Outcome.EXACT, Outcome.CLOSE)
        if not is_right:
            label = label_text(managed.geometry, managed.saved_in)
            name = "its recipe" if recipe is None else recipe.name
            logger.info("vdnn: %s cannot be recomputed by %s at its use: it is kept or moved.", label, name)
            if place is not None:
                self._outcomes[place] = Outcome.WRONG
        return is_right

    def with_encoding(self, codec: Codec, took_ns: int, took_bytes: int) -> Proof:
        """The cost of a codec, with that of the encoding the first time that this was seen."""
        cost = self.cost(codec)
        if not cost.kept_bytes:
            cost = replace(cost, kept_bytes=codec.kept_bytes, giving_up_ns=took_ns, giving_up_bytes=took_bytes)
            self._costs[codec.signature] = cost
        return cost

    def _tried(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        original: tuple[torch.UntypedStorage, int] | None,
        gauges: Gauges | None,
        *,
        is_quiet: bool = False,
    ) -> Outcome:
        try:
            with contextlib.nullcontext() if gauges is None else gauges.unnoticed():
                return self._compared(managed, recipe, original, gauges, is_quiet)
        except torch.OutOfMemoryError:
            return Outcome.UNKNOWN
        except UnknownLayoutError:
            return Outcome.WRONG
        except Exception as error:  # a trial is ours: whatever it raises, the step goes on without the recipe
            if not is_quiet:
                self._say_once(f"{error} It is not rebuilt.")
            return Outcome.WRONG

    def _compared(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        original: tuple[torch.UntypedStorage, int] | None,
        gauges: Gauges | None,
        is_quiet: bool,
    ) -> Outcome:
        """The first time that its signature is seen, its cost is found out too."""
        is_fake, is_known = managed.transport.fake, self._costs.get(recipe.signature) is not None
        if is_fake and is_known:
            return Outcome.EXACT
        if original is None and not is_fake:
            return Outcome.UNKNOWN  # it has left already
        trial = Trial(managed, recipe, gauges)
        made = trial.run()
        outcome = Outcome.EXACT if is_fake else self._verdict(managed, recipe, original, made, is_quiet)
        if not is_known and outcome in (Outcome.EXACT, Outcome.CLOSE):
            del made
            if not is_fake and gauges is not None:
                trial.run()  # the first may have loaded and chosen kernels
            self._costs[recipe.signature] = trial.proof
        return outcome

    def _verdict(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        original: tuple[torch.UntypedStorage, int] | None,
        made: torch.Tensor,
        is_quiet: bool,
    ) -> Outcome:
        if original is None:
            return Outcome.UNKNOWN
        there, tolerance = bytes_of(*original, managed.nbytes), self._tolerance
        if is_as_it_was(recipe, there, made):
            return Outcome.EXACT
        wanted, storage = "bit for bit", made.untyped_storage()
        may_differ = tolerance.limit is not None and not isinstance(recipe, Codec) and not managed.has_several_dtypes
        if may_differ and storage.nbytes() == managed.nbytes:
            difference = difference_between(there, bytes_of(storage, 0, managed.nbytes), made.dtype)
            if tolerance.admits(difference):
                tolerance.follow(recipe.name, difference)
                return Outcome.CLOSE
            wanted = f"within the tolerance of {tolerance.limit:g} ({difference:.2g} of the largest apart)"
        if not is_quiet:
            label = label_text(managed.geometry, managed.saved_in)
            self._say_once(f"{label} does not come out {wanted} by {recipe.name}: it is not rebuilt.")
        return Outcome.WRONG

    def _say_once(self, sentence: str) -> None:
        if self._said.get(sentence) is None:
            self._said[sentence] = True
            logger.warning("vdnn: %s", sentence)
