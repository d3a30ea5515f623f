"""What a session knows of recomputing: recipes are found where tensors are saved, proven, told of, and followed.

What is proven of them is in proofs.py; what is compared for ever, in rechecks.py; who reads what, in readers.py.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute import (
    NormWatch,
    Recipe,
    find_recipe,
    note_saved,
    observe_flags,
    observe_parameters,
    owner_recipe,
)
from vdnn.runtime.recompute.codecs import LOSSLESS, Codec, codec_for
from vdnn.runtime.recompute.later_recipe import later
from vdnn.runtime.recompute.proofs import Outcome, Place, Proofs
from vdnn.runtime.recompute.readers import Readers
from vdnn.runtime.recompute.rechecks import Check, Rechecks
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.recompute.snapshots import Snapshots
from vdnn.runtime.recompute.tolerance import Tolerance
from vdnn.runtime.steps.watch import StepWatch
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey, key_of_encoded

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr

_DEPTH = 8  # operations of a chain
# Saves of later operations among whose nodes the maker of integers is looked for.
_LATER_SAVES = 8


class _Encoding(NamedTuple):
    """A save that a codec takes, whose operation may not be over."""

    packed: weakref.ref[PackedView]
    codec: type[Codec]
    is_to_go: bool
    place: SaveKey | None
    sequence_nr: int  # autograd's, when it was saved


@dataclass(slots=True)
class _Ownerless:
    """A save without a history whose maker is yet to be found."""

    packed: weakref.ref[PackedView]
    is_to_go: bool
    place: SaveKey | None
    tries: int = _LATER_SAVES


@dataclass(slots=True)
class _Here:
    """What waits on one thread."""

    ownerless: list[_Ownerless]
    encodings: list[_Encoding]


class _ToProve(NamedTuple):
    """A recipe that is tried again at the use. `recipe` None: a codec, of which one dtype can be said."""

    recipe: Callable[[], Recipe | None] | None
    place: Place | None


class SessionRecipes:
    """Of one session. `our_unpack` is its hook."""

    def __init__(
        self,
        our_unpack: Callable[..., torch.Tensor],
        steps: StepWatch | None,
        tolerance: Tolerance,
        rechecks: Rechecks,
    ) -> None:
        self._codecs = LOSSLESS if steps is None else steps.options.codecs
        self._our_unpack = our_unpack
        self._steps = steps
        self._proofs = Proofs(tolerance)
        self._rechecks = rechecks
        self.readers = Readers()
        self._snapshots = Snapshots()
        # What comes back only within the tolerance: what is made of it might not, so nothing is.
        self._close: weakref.WeakSet[ManagedStorage] = weakref.WeakSet()
        self._to_prove: weakref.WeakKeyDictionary[ManagedStorage, _ToProve] = weakref.WeakKeyDictionary()
        self.norms = NormWatch()
        self._local = threading.local()

    @property
    def _gauges(self) -> Gauges | None:
        return None if self._steps is None else self._steps.gauges

    # Torch's hooks around modules.

    def before_module(self, module: torch.nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            observe_flags()
            observe_parameters(module)
            self.norms.enter(module)

    def behind_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.norms.leave(module)
            observe_flags()

    # At the saves.

    def saved(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_new: bool) -> None:
        """Of every managed save; where nothing is planned yet, what could be recomputed is looked for."""
        if self._steps is None:
            self._encode()
        if node is not None:
            self._find_owners(node)
            note_saved(node, tensor.output_nr, packed)
        if is_new and self._steps is not None and self._steps.looks_for_recomputes:
            self._look(packed, tensor, node, is_to_go=False)

    def discard(self, packed: PackedView, tensor: torch.Tensor, node: Any) -> bool:
        """The plan recomputes it: gives it up, or as soon as its maker is known. False if it cannot be recomputed."""
        return self._look(packed, tensor, node, is_to_go=True)

    def _look(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_to_go: bool) -> bool:
        managed = packed.managed
        source = managed.source_storage
        if source is None or source.nbytes() != managed.nbytes:
            return False  # a part of a storage
        place = None if self._steps is None else self._steps.place
        recipe = None if node is None else find_recipe(tensor, node, self._our_unpack, max_depth=_DEPTH, expensive=True)
        codec = codec_for(tensor, self._codecs) if tensor.nbytes == managed.nbytes else None
        if recipe is not None and not recipe.is_cheap and codec is not None:
            recipe = None  # who names a lossy codec would rather have that than a product done again
        if recipe is not None and self._found(managed, recipe, place, is_to_go=is_to_go):
            return True
        if codec is not None:
            self._here().encodings.append(_Encoding(weakref.ref(packed), codec, is_to_go, place, _sequence_nr()))
            return True
        if node is None:
            if tensor.dtype is not torch.int64 or tensor.requires_grad:
                return False
            self._here().ownerless.append(_Ownerless(weakref.ref(packed), is_to_go, place))
            return True
        return False

    def _here(self) -> _Here:
        here: _Here | None = getattr(self._local, "here", None)
        if here is None:
            here = self._local.here = _Here([], [])
        return here

    def _find_owners(self, node: Any) -> None:
        waiting = self._here().ownerless
        for one in list(waiting):
            one.tries -= 1
            packed = one.packed()
            recipe = None if packed is None else owner_recipe(packed, node, self._our_unpack)
            if packed is not None and recipe is not None:
                self._found(packed.managed, recipe, one.place, is_to_go=one.is_to_go)
            if packed is None or recipe is not None or not one.tries:
                waiting.remove(one)

    def _found(self, managed: ManagedStorage, recipe: Recipe, place: SaveKey | None, *, is_to_go: bool) -> bool:
        if any(operand.managed is managed or operand.managed in self._close for operand in recipe.operands):
            return False
        if is_to_go and self._steps is None:
            recipe = self._snapshots.of(recipe)
        outcome = self._proofs.at_save(managed, recipe, place, self._gauges)
        if outcome not in (Outcome.EXACT, Outcome.CLOSE):
            return False
        if outcome is Outcome.CLOSE:
            if managed.has_several_dtypes:
                return False
            self._close.add(managed)
        is_exact = outcome is Outcome.EXACT
        if is_to_go:
            if not self._discard(managed, recipe, place, is_exact=is_exact):
                return False
            self.readers.add(managed, recipe)
            return True
        self._can_be_recomputed(managed, recipe.name, recipe.operands, self._proofs.cost(recipe))
        if not managed.transport.fake:
            key = None if place is None else (recipe.signature, place)
            self._to_prove[managed] = _ToProve(later(recipe), key)
        return True

    def _can_be_recomputed(
        self, managed: ManagedStorage, name: str, operands: Sequence[PackedView], cost: RecomputeCost
    ) -> None:
        if self._steps is None:
            raise RuntimeError("what can be recomputed is looked for, and nobody follows the steps")
        self._steps.can_be_recomputed(managed, name, [operand.managed for operand in operands], cost)

    def _discard(
        self, managed: ManagedStorage, recipe: Recipe | Codec, place: SaveKey | None, *, is_exact: bool
    ) -> bool:
        check: Check | None = None
        if is_exact and managed.can_be_discarded:
            check = self._rechecks.check(managed, recipe.name, recipe.signature, place)
        return managed.discard(recipe, is_exact=is_exact, check=check)

    # At the uses.

    def used(self, packed: PackedView, tensor: torch.Tensor) -> None:
        """`packed` was unpacked as `tensor`. What might have been recomputed for it is tried now: see proofs.py."""
        managed = packed.managed
        to_prove = self._to_prove.pop(managed, None)
        if to_prove is None or to_prove.recipe is None:
            return
        original = tensor.untyped_storage(), packed.begin_in(tensor)
        recipe = to_prove.recipe()
        if not self._proofs.at_use(managed, recipe, to_prove.place, original, self._gauges):
            self._withdraw(managed)

    def saved_as_another_dtype(self, managed: ManagedStorage) -> None:
        """A codec speaks for the values of one dtype, and so does a tolerance; a recipe that is exact, for bytes."""
        managed.has_several_dtypes = True
        to_prove = self._to_prove.get(managed)
        if managed in self._close or (to_prove is not None and to_prove.recipe is None):
            self._withdraw(managed)

    def _withdraw(self, managed: ManagedStorage) -> None:
        if self._steps is not None:
            self._steps.cannot_be_recomputed(managed)

    # Codecs, as soon as the operation is over. Encoding is computing, before the hook that finds it.

    @contextlib.contextmanager
    def hook(self, transport: Transport) -> Iterator[None]:
        """Around all that a hook does to the device, where steps are watched."""
        steps = self._steps
        if steps is None:
            raise RuntimeError("hooks are followed only where steps are")
        self._encode()
        with steps.hook(transport):
            self._look_at_encodings()
            yield

    def _complete_encodings(self, *, is_to_go: bool) -> Iterator[tuple[PackedView, _Encoding]]:
        here = self._here()
        if not here.encodings:
            return
        now = _sequence_nr()
        ready = [one for one in here.encodings if one.is_to_go is is_to_go and one.sequence_nr != now]
        here.encodings = [one for one in here.encodings if one not in ready]
        for one in ready:
            packed = one.packed()
            if packed is None or packed.managed.source_storage is None or packed.managed.has_several_dtypes:
                continue
            if one.codec.admits(packed.view_of(packed.managed.source_storage, packed.managed.begin)):
                yield packed, one

    def _encode(self) -> None:
        for packed, one in self._complete_encodings(is_to_go=True):
            managed, steps = packed.managed, self._steps
            with contextlib.nullcontext() if steps is None else steps.recomputing(managed.transport):
                if self._codec_cost(packed, one) is None:
                    continue
                encoded = _encoded(packed, one.codec)
                is_gone = self._discard(managed, encoded, one.place, is_exact=one.codec.is_exact)
                if is_gone and steps is not None and one.place is not None:
                    self._follow_encoded(encoded, one.place, steps)

    def _follow_encoded(self, encoded: Codec, place: SaveKey, steps: StepWatch) -> None:
        """In a plan what is left has a lifetime of its own, and may leave the device."""
        left, key = encoded.managed, key_of_encoded(place, encoded.name, encoded.kept_bytes)
        with steps.hook(left.transport):
            left.is_to_leave = steps.encoded(left, key) is Action.OFFLOAD
            left.complete(offloads=left.is_to_leave)

    def _look_at_encodings(self) -> None:
        for packed, one in self._complete_encodings(is_to_go=False):
            cost = self._codec_cost(packed, one)
            if cost is not None:
                self._can_be_recomputed(packed.managed, one.codec.name, (), cost)
                self._to_prove[packed.managed] = _ToProve(None, None)

    def _codec_cost(self, packed: PackedView, one: _Encoding) -> RecomputeCost | None:
        """Tried at each place, like a recipe; what the encoding costs is found out the first time."""
        managed, gauges = packed.managed, self._gauges
        known = self._proofs.known((one.codec.name, packed.geometry), one.place, is_fake=managed.transport.fake)
        if known is not None:
            return known.cost if known.outcome is Outcome.EXACT else None
        took_ns = took_bytes = 0
        with contextlib.nullcontext() if gauges is None else gauges.unnoticed():
            stream = managed.transport.current_stream()
            if gauges is not None:
                gauges.take_peaks()
                before_bytes, begin = gauges.allocated_bytes(), gauges.mark(stream)
            encoded = _encoded(packed, one.codec)
            if gauges is not None:
                took_ns = gauges.ns_between(begin, gauges.mark(stream))
                took_bytes = gauges.take_peaks()[0] - before_bytes
        outcome = self._proofs.at_save(managed, encoded, one.place, gauges)
        if outcome is not Outcome.EXACT:
            return None
        return self._proofs.with_encoding(encoded, took_ns, took_bytes)


def _encoded(packed: PackedView, codec: type[Codec]) -> Codec:
    managed = packed.managed
    source = managed.source_storage
    if source is None:
        raise RuntimeError("a storage that has left the device cannot be encoded")
    return codec(packed.view_of(source, managed.begin), managed.transport, managed.counters)
