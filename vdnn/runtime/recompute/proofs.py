"""A session's record of trials: whether each recipe gives the original value for a save, and its recompute cost.

[Note: Trials at the save and at the use] Before a recipe replaces a value it runs beside the original, and the two are
compared byte for byte: at the save, for every save key at which it is to be used. In the first step without a plan that
has this save it runs again at the first use of the value in each backward pass, with the operands and settings of that
moment. So if a program writes to an operand in between in every step, in whatever way, the recipe is not used. A recipe
whose result differs is not used for that save key again, and this is reported once.

A recipe's signature holds its operations, scalars, shapes, strides, dtypes and settings. Writes that autograd does not
record leave no trace in the graph. A policy that discards without a plan compares every value, until its steps repeat
an earlier one. Tensors without data cannot be compared: their recipes are trusted, and a trial only measures the cost.
Rechecks (rechecks.py) find what changes in some steps only. If the user gives a tolerance, recipes whose result is
within it are used too.

[Note: Trials of other sizes] A recipe whose operations work on each number or row by itself is not tried again at every
size: once it was exact at a save of the same form, it is followed at other sizes, and its first two results there are
rechecked (docs/decisions/0082). If it was ever not exact at some size, every size is tried. A measured trial is always
of its own size. With a tolerance, and where rechecks are off, every size is tried.

[Note: Trials under stored plans] A plan of an earlier run is followed from the first step, so nothing was tried in this
process. Each of its recipes is tried at its save, as in every step that follows a plan, and rechecked at its first two
uses: a hash of the original is compared with one of what was recomputed, and a difference raises before the optimizer
runs. Where the budget has no room for the trial, or its operands are discarded, the recheck alone decides: the earlier
run has tried the recipe at this save, with the same versions on the same card. Where rechecks find nothing (recheck=0,
a tolerance), stored plans that recompute are not followed.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch

from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute import Recipe, UnknownLayoutError
from vdnn.runtime.recompute.codecs import Codec
from vdnn.runtime.recompute.held_results import HeldResults
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.recompute.tolerance import Tolerance, difference_between
from vdnn.runtime.recompute.trial import Trial, bytes_of, gives_original, trial_bytes
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.forms import Form
from vdnn.step.recording import SaveKey

logger = logging.getLogger("vdnn")

_MOST_KNOWN = 8192  # a scalar that changes in every step makes a new signature each time

# Recipes that a recheck, anywhere in this process, found to give other bytes than the original.
disabled_recipes: set[str] = set()

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
HasRoom = Callable[[int], bool]  # if this many bytes may be allocated now


class TrialKey(NamedTuple):
    """Identifies a trial: the recipe's signature and the save key, and the same without sizes if they do not count."""

    sized: tuple[Hashable, SaveKey]
    shapeless: tuple[Hashable, Form] | None = None


def always(nbytes: int) -> bool:
    """True: there is room for any trial."""
    return True


class Outcome(Enum):
    """The outcome of a trial."""

    EXACT = "bit for bit"
    CLOSE = "within the tolerance"
    WRONG = "neither"
    UNKNOWN = "could not be compared this time"
    WAITS = "there is no room for it yet"


class Recent(Generic[Key, Value]):
    """A dictionary that keeps its `most` most recently used entries, none of them None."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._most = most

    def get(self, key: Key) -> Value | None:
        found = self._entries.get(key)
        if found is not None and 2 * len(self._entries) > self._most:  # until then nothing is removed for long
            self._entries.move_to_end(key)
        return found

    def __setitem__(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)


class Proofs:
    """The trials of one session and their outcomes."""

    def __init__(self, tolerance: Tolerance, held: HeldResults | None = None) -> None:
        """`held`: the session tries each recipe again in each step."""
        self._tolerance = tolerance
        self._held = held
        self._costs: Recent[Hashable, RecomputeCost] = Recent()  # by signature
        self._run_without_data: Recent[Hashable, bool] = Recent()  # signatures
        self._outcomes: Recent[tuple[Hashable, SaveKey], Outcome] = Recent()
        # Without sizes: EXACT, or WRONG if it was not at some size. See [Note: Trials of other sizes].
        self._at_any_size: Recent[tuple[Hashable, Form], Outcome] = Recent()
        self._was_right_at_use: Recent[Hashable, bool] = Recent()  # sized and shapeless parts of trial keys
        self._warned: Recent[str, bool] = Recent(256)
        self.refuted = 0  # trials that found a recipe not exact

    def __len__(self) -> int:
        """The number of entries."""
        known = len(self._costs) + len(self._run_without_data) + len(self._outcomes) + len(self._at_any_size)
        return known + len(self._was_right_at_use)

    def known(self, signature: Hashable, save_key: SaveKey | None, *, is_fake: bool, measures: bool) -> Outcome | None:
        """The outcome of an earlier trial; None if a trial is needed, which with `measures` also gives the cost."""
        if measures and self._costs.get(signature) is None:
            return None
        if is_fake:
            return Outcome.EXACT if self._run_without_data.get(signature) is not None else None
        return None if save_key is None else self._outcomes.get((signature, save_key))

    def cost(self, name: str, signature: Hashable) -> RecomputeCost:
        """The cost of a recipe or codec whose measured trial succeeded."""
        found = self._costs.get(signature)
        if found is None:
            raise RuntimeError(f"the recompute cost of {name} is not known: no trial of it succeeded")
        return found

    def _known_at(self, trial_key: TrialKey) -> Outcome | None:
        known = self._outcomes.get(trial_key.sized)
        if known is None and trial_key.shapeless is not None and self._tolerance.limit is None:
            known = self._at_any_size.get(trial_key.shapeless)
            return known if known is Outcome.EXACT else None
        return known

    def is_exact(self, trial_key: TrialKey) -> bool:
        """True if an earlier trial found the recipe exact at this save."""
        return self._known_at(trial_key) is Outcome.EXACT

    def _note(self, trial_key: TrialKey, outcome: Outcome) -> None:
        self.refuted += outcome is not Outcome.EXACT
        self._outcomes[trial_key.sized] = outcome
        if trial_key.shapeless is None:
            return
        if outcome is not Outcome.EXACT:
            self._at_any_size[trial_key.shapeless] = Outcome.WRONG
        elif self._at_any_size.get(trial_key.shapeless) is None:
            self._at_any_size[trial_key.shapeless] = outcome

    # See [Note: Trials at the save and at the use].

    @property
    def has_been_right(self) -> bool:
        """True if a trial at any use succeeded."""
        return len(self._was_right_at_use) > 0

    def was_right_at_use(self, trial_key: TrialKey | None) -> bool:
        """True if a trial at an earlier use succeeded, for this size or where sizes do not count."""
        if trial_key is None or self._tolerance.limit is not None:
            return False
        if self._was_right_at_use.get(trial_key.sized) is not None:
            return True
        is_right = trial_key.shapeless is not None and self._at_any_size.get(trial_key.shapeless) is Outcome.EXACT
        return is_right and self._was_right_at_use.get(trial_key.shapeless) is not None

    def without_trial(self, recipe: Recipe | Codec, trial_key: TrialKey | None, *, measures: bool) -> Outcome | None:
        """The outcome that `at_save` returns if earlier trials tell it; else None."""
        if recipe.name in disabled_recipes:
            return Outcome.WRONG
        known = None if trial_key is None else self._known_at(trial_key)
        is_enough = not measures or self._costs.get(recipe.signature) is not None
        return known if known is Outcome.WRONG or is_enough else None

    def at_save(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        trial_key: TrialKey | None,
        gauges: Gauges | None,
        has_room: HasRoom = always,
        *,
        measures: bool,
        again: bool = False,
    ) -> Outcome:
        """Try the recipe while the original is on the device, once for each save key. Without room for that it waits
        for its use, if its cost is known. With `measures` its cost is known afterwards, if it succeeds: a recording
        needs it, and a step that follows a plan does not. `again`: also if it was exact before."""
        known = self.without_trial(recipe, trial_key, measures=measures)
        if known is not None and not (again and known is Outcome.EXACT):
            return known
        cost = self._costs.get(recipe.signature)
        is_enough = not measures or cost is not None
        if not has_room(trial_bytes(managed, recipe, cost)):
            has_cost = cost is not None or not measures
            return Outcome.WAITS if has_cost and self._tolerance.limit is None else Outcome.UNKNOWN
        source = managed.source.storage
        original = None if source is None else (source, 0)
        outcome = self._try(managed, recipe, original, gauges, measures=not is_enough)
        if trial_key is not None and outcome is not Outcome.UNKNOWN:
            self._note(trial_key, outcome)
        return outcome

    def at_use(
        self,
        managed: ManagedStorage,
        recipe: Recipe | None,
        trial_key: TrialKey | None,
        original: tuple[torch.UntypedStorage, int],
        gauges: Gauges | None,
        has_room: HasRoom = always,
    ) -> bool:
        """Try the recipe at the use. True if it gives the original; False also if there is no room for that. `recipe`
        None: an operand was freed. `original` is the storage that has the bytes now, and where they begin in it."""
        if recipe is not None and not has_room(trial_bytes(managed, recipe, self._costs.get(recipe.signature))):
            return False  # a later step may have the memory
        outcome = Outcome.UNKNOWN
        if recipe is not None:
            outcome = self._try(managed, recipe, original, gauges, measures=False, is_quiet=True)
        is_right = outcome in (Outcome.EXACT, Outcome.CLOSE)
        if not is_right:
            label = managed.facts.label
            name = "its recipe" if recipe is None else recipe.name
            logger.info("vdnn: %s cannot be recomputed by %s at its use: it is kept or offloaded.", label, name)
            if trial_key is not None:
                self._note(trial_key, Outcome.WRONG)
        elif trial_key is not None:
            self._was_right_at_use[trial_key.sized] = True
            if trial_key.shapeless is not None:
                self._was_right_at_use[trial_key.shapeless] = True
            if self._outcomes.get(trial_key.sized) is None:
                self._note(trial_key, outcome)  # it had waited for this use
        return is_right

    def is_checked_at_use(self, trial_key: TrialKey) -> None:
        """There was no room for a trial at the save. See [Note: Trials under stored plans]."""
        self._note(trial_key, Outcome.EXACT)

    def add_encoding(self, codec: Codec, took_ns: int, took_bytes: int) -> None:
        """Adds the time and memory that the encoding took to the cost of a codec, at the first call."""
        cost = self.cost(codec.name, codec.signature)
        if not cost.kept_bytes:
            cost = replace(cost, kept_bytes=codec.kept_bytes, discard_ns=took_ns, discard_bytes=took_bytes)
            self._costs[codec.signature] = cost

    def _try(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        original: tuple[torch.UntypedStorage, int] | None,
        gauges: Gauges | None,
        *,
        measures: bool,
        is_quiet: bool = False,
    ) -> Outcome:
        try:
            with contextlib.nullcontext() if gauges is None else gauges.unnoticed():
                return self._run_trial(managed, recipe, original, gauges, measures, is_quiet)
        except torch.OutOfMemoryError:
            return Outcome.UNKNOWN
        except UnknownLayoutError:
            return Outcome.WRONG
        except Exception as error:  # whatever a trial raises, the step continues without the recipe
            if not is_quiet:
                self._warn_once(f"{error} It is not recomputed.")
            return Outcome.WRONG

    def _run_trial(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        original: tuple[torch.UntypedStorage, int] | None,
        gauges: Gauges | None,
        measures: bool,
        is_quiet: bool,
    ) -> Outcome:
        """Run the recipe and compare, and measure its cost if that is wanted."""
        is_fake = managed.transport.fake
        if is_fake and not measures and self._run_without_data.get(recipe.signature) is not None:
            return Outcome.EXACT
        if original is None and not is_fake:
            return Outcome.UNKNOWN  # already released
        trial = Trial(managed, recipe, gauges if measures else None, self._held)
        made = trial.run()
        if is_fake:
            outcome = Outcome.EXACT
            self._run_without_data[recipe.signature] = True
        else:
            with contextlib.nullcontext() if gauges is None else gauges.host_waits():
                outcome = self._compare(managed, recipe, original, made, is_quiet)
            if self._held is not None and outcome is Outcome.EXACT:
                self._held.hold(managed, made.untyped_storage())
        if measures and outcome in (Outcome.EXACT, Outcome.CLOSE):
            del made
            if not is_fake and gauges is not None:
                trial.run()  # the first run may have loaded and chosen kernels
            self._costs[recipe.signature] = trial.cost
        return outcome

    def _compare(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        original: tuple[torch.UntypedStorage, int] | None,
        made: torch.Tensor,
        is_quiet: bool,
    ) -> Outcome:
        if original is None:
            return Outcome.UNKNOWN
        expected, tolerance = bytes_of(*original, managed.nbytes), self._tolerance
        if gives_original(recipe, expected, made):
            return Outcome.EXACT
        wanted, storage = "bit for bit", made.untyped_storage()
        may_differ = tolerance.limit is not None and not isinstance(recipe, Codec) and not managed.has_several_dtypes
        if may_differ and storage.nbytes() == managed.nbytes:
            difference = difference_between(expected, bytes_of(storage, 0, managed.nbytes), made.dtype)
            if tolerance.admits(difference):
                tolerance.follow(recipe.name, difference)
                return Outcome.CLOSE
            wanted = (
                f"within the tolerance of {tolerance.limit:g} (difference: {difference:.2g} of the largest magnitude)"
            )
        if not is_quiet:
            label = managed.facts.label
            self._warn_once(
                f"recomputing {label} by {recipe.name} does not give the original {wanted}: it is not recomputed."
            )
        return Outcome.WRONG

    def _warn_once(self, sentence: str) -> None:
        if self._warned.get(sentence) is None:
            self._warned[sentence] = True
            logger.warning("vdnn: %s", sentence)
