"""The recipes of one session: found at saves, tried, reported to the recorder, and followed when a plan recomputes.

proofs.py tries recipes, rechecks.py compares what they recompute in later steps, and readers.py knows their operands.

[Note: Discards without a plan] A policy that discards has no recorded step in which all recipes were tried at their
uses. So its recipes read copies of the leaves (snapshots.py), and each of them is tried at each save. A step that
repeats another one follows those that were exact there, as any plan does, and tries nothing.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute import (
    Recipe,
    find_recipe,
    note_saved,
    observe_flags,
    observe_parameters,
    owner_recipe,
)
from vdnn.runtime.recompute.backend_flags import torch_settings, watch_denormals, were_observed_at_save
from vdnn.runtime.recompute.codecs import Codec, codec_for
from vdnn.runtime.recompute.given import Leaf
from vdnn.runtime.recompute.held_results import HeldResults
from vdnn.runtime.recompute.leaf_versions import reader_of
from vdnn.runtime.recompute.leaves_at_rest import LeavesAtRest
from vdnn.runtime.recompute.proofs import Outcome, Proofs, TrialKey, disabled_recipes
from vdnn.runtime.recompute.readers import Readers
from vdnn.runtime.recompute.rechecks import Check, Rechecks
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.recompute.snapshots import Snapshots
from vdnn.runtime.recompute.tolerance import Tolerance
from vdnn.runtime.recompute.weak_recipe import weak_recipe
from vdnn.runtime.steps.steps import Steps
from vdnn.runtime.storage.deferred_copies import AfterOperation
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.backward_ends import graph_task
from vdnn.runtime.torch_internals.module_watch import LEAVES, SETTINGS
from vdnn.step.forms import Form
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey, key_of_encoded

_MOST_FAILURES = 2  # of settled steps
_DEPTH = 8  # operations in a chain
_MOST_RIGHT = 4096
_LATER_SAVES = (
    8  # an integer save waits for this many later saves, whose nodes are searched for the operation that made it
)


class _Encoding(NamedTuple):
    """A save that a codec will encode once its operation is complete."""

    packed: weakref.ref[PackedView]
    codec: type[Codec]
    save_key: SaveKey | None


@dataclass(slots=True)
class _Ownerless:
    """A save without a grad_fn, whose maker has not been found yet."""

    packed: weakref.ref[PackedView]
    discards: bool
    save_key: SaveKey | None
    tries: int = _LATER_SAVES


class _TrialAtUse(NamedTuple):
    """A recipe that is tried again at the use, in each backward pass that uses the storage: a program may write to an
    operand between two of them. `recipe` is None for a codec, which is not tried again. `backward`: the graph task of
    the last trial."""

    recipe: Callable[[], Recipe | None] | None
    key: TrialKey | None
    backward: int | None = None


class _Right(NamedTuple):
    """A recipe that trials at a save and at its use have found exact. `refuted`: how many trials had failed by then;
    after the next one it is looked up again. `save_key` keeps its id from being reused."""

    save_key: SaveKey
    signature: Hashable
    refuted: int
    cost: RecomputeCost


class SessionRecipes:
    """Finds, tries and follows the recipes of one session. `our_unpack` is the session's unpack hook."""

    def __init__(
        self,
        our_unpack: Callable[..., torch.Tensor],
        steps: Steps,
        tolerance: Tolerance,
        rechecks: Rechecks,
        readers: Readers,
        running: _C.RunningModules,
    ) -> None:
        self._running = running
        self._failures = 0
        self._codecs = steps.codecs
        self.our_unpack = our_unpack
        self._steps = steps
        # Discards that no recorded step has tried at their uses.
        self._discards_online = steps.discards_online
        self._held = HeldResults() if steps.discards_online else None
        self._proofs = Proofs(tolerance, self._held)
        self._rechecks = rechecks
        self.readers = readers
        self._snapshots = Snapshots(running)
        # Recomputed only within the tolerance. No recipe reads them: its result might be outside of the tolerance.
        self._inexact: weakref.WeakSet[ManagedStorage] = weakref.WeakSet()
        self._are_inexact: set[weakref.ref[ManagedStorage]] = self._inexact.data  # type: ignore[attr-defined]
        self._trials_at_use: weakref.WeakKeyDictionary[ManagedStorage, _TrialAtUse] = weakref.WeakKeyDictionary()
        # As plain containers: to ask a weak one takes a call of Python, also if it is empty, which it usually is.
        self._wait_for_use: dict[Any, _TrialAtUse] = self._trials_at_use.data  # type: ignore[attr-defined]
        self.leaves = LeavesAtRest()
        self._to_encode: AfterOperation[_Encoding] = AfterOperation()
        self._to_try: AfterOperation[_Encoding] = AfterOperation()
        self._local = threading.local()
        self._right: dict[int, _Right] = {}  # by the id of the save key, which the steps of a session share

    def cut(self) -> None:
        """No recipe will be followed. See abandoned.py."""
        self.our_unpack = unpack_without_hooks
        self.step_ended()

    def step_ended(self) -> None:
        """Releases what trials made in the step."""
        if self._held is not None:
            self._held.release()
            self._snapshots.renew()

    def before_writes(self) -> None:
        """An optimizer is about to step."""
        self._snapshots.renew()

    @property
    def _gauges(self) -> Gauges | None:
        return self._steps.gauges

    # At the boundaries of module calls: see [Note: Facts at boundaries] in module_watch.py.

    def watch_modules(self, gate: _C.Gate | None) -> Iterator[Callable[[], None]]:
        """Notes facts from now on. Yields what ends that."""
        observe_flags()
        yield watch_denormals()
        self._running.note(observe_parameters, torch_settings, gate)
        yield self._running.note_nothing

    def _need_facts_of(self, recipe: Recipe) -> None:
        """A plan follows this recipe, which settled steps will find again: there the same facts are noted."""
        need = self._running.need
        for node in recipe.sensitive_nodes:
            if not were_observed_at_save(node):
                self._running.needs_boundaries = True
                for module in _C.modules_around(node):
                    need(module, SETTINGS)
        for given in recipe.given:
            if isinstance(given, Leaf) and (reader := reader_of(given.tensor)) is not None:
                need(id(reader), LEAVES)
                self.leaves.need(reader, given.tensor)

    def not_found(self) -> None:
        """A recipe was not found in a settled step. Programs that make their modules anew in each step need all facts
        of each module."""
        self._failures += 1
        self._running.notes_everything = self._failures >= _MOST_FAILURES

    # At the saves.

    def saved(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_new: bool) -> None:
        """Called for every managed save. In a step that is recorded, searches for a way to recompute it."""
        if node is not None:
            self._find_owners(node)
            note_saved(node, tensor.output_nr, packed)
        if is_new and self._steps.looks_for_recomputes:
            self._search(packed, tensor, node, discards=False)

    def kept_natively(self, save: _C.KeptSave, tensor: torch.Tensor, node: Any, *, is_new: bool) -> bool:
        """The same for a save that the gate keeps in a step without a plan. False if its storage has to be managed so
        that `search` can go on: a recipe or a codec has to be tried, now or at the use."""
        if node is not None:
            self._find_owners(node)
            note_saved(node, tensor.output_nr, save)
        transport = self._steps.transport
        if not is_new or transport is None or not self._steps.looks_for_recomputes:
            return True
        recipe = None if node is None else self._find(tensor, node)
        if recipe is None or not recipe.is_cheap:
            if codec_for(tensor, self._codecs, transport) is not None:
                return False
            if recipe is None:
                return node is not None or not _may_have_owner(tensor)
        right = self._known_right(recipe, transport)
        return right is not None and self._steps.can_be_recomputed(save, recipe.name, recipe.read_saves, right.cost)

    def _known_right(self, recipe: Recipe, transport: Transport) -> _Right | None:
        """The cost of a recipe that needs no trial, neither at this save nor at its use. None if it needs one, or is
        wrong."""
        key, signature, refuted = self._steps.save_key, recipe.signature, self._proofs.refuted
        if key is None or self._are_inexact or recipe.name in disabled_recipes:
            return None
        known = self._right.get(id(key))
        if known is not None and known.signature is signature and known.refuted == refuted:
            return known
        trial_key = self._trial_key_of(transport, recipe, key, self._steps.save_form)
        outcome = self._proofs.without_trial(recipe, trial_key, measures=True)
        if outcome is not Outcome.EXACT or not self._proofs.was_right_at_use(trial_key):
            return None
        if len(self._right) >= _MOST_RIGHT:
            self._right.clear()
        right = self._right[id(key)] = _Right(key, signature, refuted, self._proofs.cost(recipe.name, signature))
        return right

    @property
    def has_proofs(self) -> bool:
        """True if there are recipes that need no trial any more."""
        return self._proofs.has_been_right

    def search(self, packed: PackedView, tensor: torch.Tensor, node: Any) -> None:
        """Searches for a way to recompute a save that the gate has kept until now."""
        self._search(packed, tensor, node, discards=False)

    def _find(self, tensor: torch.Tensor, node: Any) -> Recipe | None:
        return find_recipe(tensor, node, self.our_unpack, max_depth=_DEPTH, expensive=True)

    def discard(self, packed: PackedView, tensor: torch.Tensor, node: Any) -> bool:
        """Discards a save that the plan recomputes: now, or as soon as its maker is known or its operation is complete.
        False if no recipe and no codec can restore it."""
        return self._search(packed, tensor, node, discards=True)

    def proven(
        self,
        tensor: torch.Tensor,
        node: Any,
        save_key: SaveKey,
        proven: dict[int, tuple[Hashable, int]],
        event: int,
        transport: Transport | None,
    ) -> Recipe | None:
        """The recipe for a save of a settled step, if it is known to be exact at this save and no recheck is due.
        `proven` remembers signatures for which that was found, by the event of the script."""
        if transport is None or self._running.notes_all():
            return None
        recipe = self._find(tensor, node)
        if recipe is None:
            return None
        template, known = recipe.template, proven.get(event)
        if self._are_inexact and any(operand.managed in self._inexact for operand in recipe.operands):
            return None
        if template.name in disabled_recipes or self._rechecks.is_checking:
            return None
        signature = template.signature
        if known is None or known[0] is not signature or known[1] != self._proofs.refuted:
            if not template.is_cheap and codec_for(tensor, self._codecs, transport) is not None:
                return None
            trial_key = self._trial_key_of(transport, recipe, save_key, self._steps.save_form)
            if trial_key is None or not self._proofs.is_exact(trial_key):
                return None
            if self._rechecks.are_due(transport, signature, save_key, trial_key.shapeless):
                return None
            proven[event] = signature, self._proofs.refuted
        return self._snapshots.of(recipe) if self._discards_online else recipe

    def _search(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, discards: bool) -> bool:
        managed = packed.managed
        source = managed.source.storage
        if source is None or source.nbytes() != managed.nbytes:
            return False  # only a part of the storage is managed
        is_watched = managed.transport is self._steps.transport  # the steps have the saves of one device only
        save_key, form = (self._steps.save_key, self._steps.save_form) if is_watched else (None, None)
        recipe = None if node is None else self._find(tensor, node)
        is_cheap = recipe is not None and recipe.is_cheap
        codec = None if is_cheap else self._codec_for(managed, tensor)
        # A user who names a lossy codec prefers it to repeating an expensive operation.
        repeated = recipe if codec is None else None
        if repeated is not None and self._accept(managed, repeated, save_key, form, discards=discards):
            return True
        codec = self._codec_for(managed, tensor) if is_cheap else codec
        if codec is not None:
            encodings = self._to_encode if discards else self._to_try
            encodings.add(_Encoding(weakref.ref(packed), codec, save_key))
            return True
        if node is None:
            if not _may_have_owner(tensor):
                return False
            self._ownerless_here().append(_Ownerless(weakref.ref(packed), discards, save_key))
            return True
        return False

    def _codec_for(self, managed: ManagedStorage, tensor: torch.Tensor) -> type[Codec] | None:
        return codec_for(tensor, self._codecs, managed.transport) if tensor.nbytes == managed.nbytes else None

    def _ownerless_here(self) -> list[_Ownerless]:
        """The saves of this thread that wait for a later save."""
        waiting: list[_Ownerless] | None = getattr(self._local, "ownerless", None)
        if waiting is None:
            waiting = self._local.ownerless = []
        return waiting

    def _find_owners(self, node: Any) -> None:
        ownerless = self._ownerless_here()
        if not ownerless:
            return
        for one in list(ownerless):
            one.tries -= 1
            packed = one.packed()
            recipe = None if packed is None else owner_recipe(packed, node, self.our_unpack)
            if packed is not None and recipe is not None:
                self._accept(packed.managed, recipe, one.save_key, None, discards=one.discards)
            if packed is None or recipe is not None or not one.tries:
                ownerless.remove(one)

    def _accept(
        self, managed: ManagedStorage, recipe: Recipe, save_key: SaveKey | None, form: Form | None, *, discards: bool
    ) -> bool:
        """Tries the recipe. If it succeeds, discards the storage or reports that it can be recomputed."""
        operands = [operand.managed for operand in recipe.operands]
        if managed in operands or (self._are_inexact and any(one in self._inexact for one in operands)):
            return False
        trial_key = self._trial_key_of(managed.transport, recipe, save_key, form)
        found, tries_again = recipe, False
        if discards and self._discards_online:  # see [Note: Discards without a plan]
            recipe, tries_again = self._snapshots.of(recipe), not self._steps.is_repeating
        # A storage that the plan recomputes takes more memory if it is kept than its trial does.
        has_room = self._making_room(managed, recipe) if discards else self._has_room(managed)
        outcome = self._proofs.at_save(
            managed, recipe, trial_key, self._gauges, has_room, measures=not discards, again=tries_again
        )
        waits_for_use = outcome is Outcome.WAITS and not discards
        is_checked = outcome is Outcome.WAITS and discards  # see [Note: Trials under stored plans] in proofs.py
        if is_checked:
            outcome = Outcome.EXACT
        if outcome not in (Outcome.EXACT, Outcome.CLOSE) and not waits_for_use:
            return False
        if outcome is Outcome.CLOSE:
            if managed.has_several_dtypes:
                return False
            self._inexact.add(managed)
        is_exact = outcome is Outcome.EXACT
        if discards:
            shapeless = None if trial_key is None else trial_key.shapeless
            if not self._discard(managed, recipe, save_key, shapeless, is_exact=is_exact, is_checked=is_checked):
                return False
            if is_checked and trial_key is not None:
                self._proofs.is_checked_at_use(trial_key)
            self.readers.add(managed)
            if self._running.notes_all():
                self._need_facts_of(found)
            return True
        cost = self._proofs.cost(recipe.name, recipe.signature)
        if self._steps.can_be_recomputed(managed, recipe.name, recipe.read_saves, cost) and is_exact:
            self._offer(managed, recipe, save_key, trial_key)
        if not managed.transport.fake and (waits_for_use or not self._proofs.was_right_at_use(trial_key)):
            self._trials_at_use[managed] = _TrialAtUse(weak_recipe(recipe), trial_key)
        return True

    def _offer(
        self, managed: ManagedStorage, recipe: Recipe, save_key: SaveKey | None, trial_key: TrialKey | None
    ) -> None:
        """Lets the guard of a step without a plan discard a storage, unless the program may write to what is read."""
        if any(isinstance(given, Leaf) and not isinstance(given.tensor, torch.nn.Parameter) for given in recipe.given):
            return
        method, reference, later = weakref.WeakMethod(self._discard_unplanned), managed.reference, weak_recipe(recipe)

        def discard() -> bool:
            discard_unplanned, alive, again = method(), reference(), later()
            if discard_unplanned is None or alive is None or again is None:
                return False
            return discard_unplanned(alive, again, save_key, trial_key)

        self._steps.can_discard(managed, recipe.read_saves, discard, is_cheap=recipe.is_cheap)

    def _discard_unplanned(
        self, managed: ManagedStorage, recipe: Recipe, save_key: SaveKey | None, trial_key: TrialKey | None
    ) -> bool:
        """It is not tried again at its use, so what is recomputed is compared with a hash, unless an earlier use has
        shown that it is right."""
        is_proven = managed.transport.fake or self._proofs.was_right_at_use(trial_key)
        shapeless = None if trial_key is None else trial_key.shapeless
        if managed.action is not Action.KEEP or not managed.is_complete:
            return False
        if not self._discard(managed, recipe, save_key, shapeless, is_exact=True, is_checked=not is_proven):
            return False
        managed.action = Action.RECOMPUTE
        self._trials_at_use.pop(managed, None)
        self.readers.add(managed)
        return True

    def _trial_key_of(
        self, transport: Transport, recipe: Recipe, save_key: SaveKey | None, form: Form | None
    ) -> TrialKey | None:
        if save_key is None:
            return None
        is_for_any_size = recipe.shapeless is not None and self._rechecks.find_faults(transport)
        shapeless = (recipe.shapeless, form) if is_for_any_size and form is not None else None
        return TrialKey((recipe.signature, save_key), shapeless)

    def _has_room(self, managed: ManagedStorage) -> Callable[[int], bool]:
        return lambda nbytes: self._steps.has_room_for_trial(managed.transport, nbytes)

    def _making_room(self, managed: ManagedStorage, recipe: Recipe) -> Callable[[int], bool]:
        """True, behind what makes room if that is needed; False if there is none and no trial is needed. A trial that
        first recomputes its operands takes memory that nobody foresees."""
        may_wait = self._may_wait(managed)
        are_discarded = any(one.managed.is_yet_to_be_recomputed for one in recipe.operands)
        if may_wait and are_discarded and not managed.transport.fake:
            return lambda nbytes: False
        return lambda nbytes: self._steps.make_room_for_trial(managed.transport, nbytes) or not may_wait

    def _may_wait(self, managed: ManagedStorage) -> bool:
        """True if an earlier run has tried what is discarded, and a recheck compares what is recomputed at its use."""
        return self._steps.follows_stored_plan and self._rechecks.find_faults(managed.transport)

    def _discard(
        self,
        managed: ManagedStorage,
        recipe: Recipe | Codec,
        save_key: SaveKey | None,
        shapeless: Hashable | None,
        *,
        is_exact: bool,
        is_checked: bool = False,
    ) -> bool:
        """With `is_checked` only if the recomputed bytes will be compared."""
        check: Check | None = None
        if is_exact and managed.can_be_discarded:
            check = self._rechecks.check(managed, recipe.name, recipe.signature, save_key, shapeless)
        if is_checked and check is None and managed.transport.integrity is None:
            return False
        if not managed.discard(recipe, is_exact=is_exact, check=check):
            return False
        if self._discards_online:
            self._steps.decided(managed, Action.RECOMPUTE)
        return True

    # At the uses.

    def used(self, packed: PackedView, tensor: torch.Tensor) -> None:
        """Called when `packed` was unpacked as `tensor`. Tries the recipe of its storage again: see proofs.py."""
        if self._held is not None:
            self._held.release()
            self._snapshots.renew()
        if not self._wait_for_use:
            return
        managed = packed.managed
        trial = self._trials_at_use.pop(managed, None)
        if trial is None or trial.recipe is None:
            return
        backward = graph_task()
        if trial.backward != backward:
            original = tensor.untyped_storage(), packed.begin_in(tensor)
            recipe = trial.recipe()
            if not self._proofs.at_use(managed, recipe, trial.key, original, self._gauges, self._has_room(managed)):
                self._steps.cannot_be_recomputed(managed)
                return
        self._trials_at_use[managed] = trial._replace(backward=backward)

    def saved_as_another_dtype(self, managed: ManagedStorage) -> None:
        """Withdraws codecs and inexact recipes: they restore values of one dtype, and exact recipes restore bytes."""
        managed.saved_as_another_dtype()
        trial = self._trials_at_use.get(managed)
        if managed in self._inexact or (trial is not None and trial.recipe is None):
            self._steps.cannot_be_recomputed(managed)

    # Codecs. A save is encoded at the first hook after its operation. Encoding counts as compute before that hook.

    def hook(self, transport: Transport) -> contextlib.AbstractContextManager[object]:
        """Surrounds a hook's work on the device in a session that watches steps."""
        if self._to_encode.number:
            self.encode_complete()
        return self._hook_with_trials(transport) if self._to_try.number else self._steps.hook(transport)

    @contextlib.contextmanager
    def _hook_with_trials(self, transport: Transport) -> Iterator[None]:
        with self._steps.hook(transport):
            self._try_encodings()
            yield

    def _complete(self, encodings: AfterOperation[_Encoding]) -> Iterator[tuple[PackedView, _Encoding]]:
        """Takes the waiting saves of this thread whose operation is over and whose codec admits them."""
        for one in encodings.take():
            packed = one.packed()
            if packed is None or packed.managed.source.storage is None or packed.managed.has_several_dtypes:
                continue
            if one.codec.admits(packed.view_of(packed.managed.source.storage, packed.managed.facts.begin)):
                yield packed, one

    @property
    def are_waiting(self) -> bool:
        """True if saves wait until they can be encoded."""
        return self._to_encode.number > 0

    def encode_complete(self) -> None:
        """Encodes the waiting saves whose operation is over."""
        for packed, one in self._complete(self._to_encode):
            managed, steps = packed.managed, self._steps
            with steps.recomputing(managed.transport):
                encoded = _encoded(packed, one.codec) if self._is_right(packed, one, measures=False) else None
                if encoded is None:
                    self._offload_instead(managed)
                    continue
                was_discarded = self._discard(managed, encoded, one.save_key, None, is_exact=one.codec.is_exact)
                if was_discarded and one.save_key is not None:
                    self._follow_encoded(encoded, one.save_key)

    def _offload_instead(self, managed: ManagedStorage) -> None:
        """A save that the plan encodes, and that cannot be encoded now, is offloaded in this step."""
        self._steps.cannot_be_recomputed(managed)
        managed.action = Action.OFFLOAD
        managed.complete()

    def _follow_encoded(self, encoded: Codec, save_key: SaveKey) -> None:
        """The encoded bytes have a lifetime of their own, which the plan may offload."""
        rest, key = encoded.managed, key_of_encoded(save_key, encoded.name, encoded.kept_bytes)
        settling = self._steps.settling
        action = None if settling is None else settling.encoded(rest, key)
        if action is not None:
            rest.action = action
            rest.complete()
            return
        with self._steps.hook(rest.transport):
            rest.action = self._steps.encoded(rest, key) or Action.KEEP
            rest.complete()
        if settling is not None:
            settling.encoded_in_python(rest, key)

    def _try_encodings(self) -> None:
        for packed, one in self._complete(self._to_try):
            if self._is_right(packed, one, measures=True):
                cost = self._proofs.cost(one.codec.name, (one.codec.name, packed.geometry))
                self._steps.can_be_recomputed(packed.managed, one.codec.name, (), cost)
                self._trials_at_use[packed.managed] = _TrialAtUse(None, None)

    def _is_right(self, packed: PackedView, one: _Encoding, *, measures: bool) -> bool:
        """Tries the codec at each save key, as recipes are tried. With `measures` the costs of encoding and decoding
        are known afterwards, if it is right."""
        managed, gauges, signature = packed.managed, self._gauges, (one.codec.name, packed.geometry)
        is_fake = managed.transport.fake
        known = self._proofs.known(signature, one.save_key, is_fake=is_fake, measures=measures)
        if known is not None:
            return known is Outcome.EXACT
        if not self._steps.has_room_for_trial(managed.transport, managed.nbytes):
            return not measures and one.codec.is_exact and self._may_wait(managed)
        encode_ns = encode_bytes = 0
        with contextlib.nullcontext() if gauges is None else gauges.unnoticed():
            stream = managed.transport.current_stream()
            if measures and gauges is not None:
                before_bytes, begin = gauges.take_peaks().allocated_bytes, gauges.mark(stream)
            encoded = _encoded(packed, one.codec)
            if encoded is None:
                return False  # not remembered: a later step may have the memory
            if measures and gauges is not None:
                end = gauges.mark(stream)
                with gauges.host_waits():
                    encode_ns = gauges.ns_between(begin, end)
                encode_bytes = gauges.take_peaks().peak_bytes - before_bytes
        has_room = self._has_room(managed)
        trial_key = None if one.save_key is None else TrialKey((signature, one.save_key))
        outcome = self._proofs.at_save(managed, encoded, trial_key, gauges, has_room, measures=measures)
        if outcome is Outcome.EXACT and measures:
            self._proofs.add_encoding(encoded, encode_ns, encode_bytes)
        return outcome is Outcome.EXACT


def _may_have_owner(tensor: torch.Tensor) -> bool:
    """True if the node of a later save may have made a save that has no node of its own: indices of a pooling."""
    return tensor.dtype is torch.int64 and not tensor.requires_grad


def _encoded(packed: PackedView, codec: type[Codec]) -> Codec | None:
    """None if the device has no memory for the encoded bytes."""
    managed = packed.managed
    source = managed.source.storage
    if source is None:
        raise RuntimeError("expected a storage on the device to encode, got one that was released")
    try:
        return codec(packed.view_of(source, managed.facts.begin), managed.transport, managed.facts.counters)
    except torch.OutOfMemoryError:
        return None
