"""What a session knows of rebuilding: recipes are found where tensors are saved, proven, told of, and followed.

[Note: Proven once] Before a recipe replaces a value it is tried on one that is there: rebuilt, and compared byte for
byte. That is done at every place of the step at which it is to be used: operations, scalars, shapes, strides, dtypes
and backend flags are what a recipe's signature says, but what a program writes behind autograd's back (under no_grad,
or through `.data`) into a value that nobody saves leaves no trace in the graph. One that differs is not followed at
that place again, and that is said once. What such a write does in some steps and not in others only integrity mode
finds. Where no steps are watched there are no places, and every value is compared. Of tensors without data nothing can
be: there recipes are believed, and only their cost is found out. Who names a tolerance has values followed that come
out within it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from vdnn.errors import VdnnError
from vdnn.recording import SaveKey, key_of_encoded
from vdnn.runtime.codecs import LOSSLESS, Codec, codec_for
from vdnn.runtime.holders import label_text
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.proof import Proof
from vdnn.runtime.recompute import Recipe, find_recipe, note_module, note_saved, observe_parameters, owner_recipe
from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.step_watch import StepWatch
from vdnn.runtime.tolerance import Tolerance, difference_between
from vdnn.runtime.transport import Transport
from vdnn.runtime.trial import Trial, is_as_it_was
from vdnn.step_plan import Action

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
logger = logging.getLogger("vdnn")

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


class _Outcome(Enum):
    """Of a trial."""

    EXACT = "bit for bit"
    CLOSE = "within the tolerance"
    WRONG = "neither"


class Rebuilds:
    """Of one session. `our_unpack` is its hook."""

    def __init__(self, our_unpack: Callable[..., torch.Tensor], steps: StepWatch | None, tolerance: Tolerance) -> None:
        self._codecs = LOSSLESS if steps is None else steps.ways.codecs
        self._our_unpack = our_unpack
        self._steps = steps
        self._proofs: dict[Hashable, Proof] = {}  # of recipes, by signature
        self._places: dict[tuple[Hashable, SaveKey], _Outcome] = {}  # of trials
        self._tolerance = tolerance
        # What comes back only within the tolerance: what is made of it might not, so nothing is.
        self._close: weakref.WeakSet[ManagedStorage] = weakref.WeakSet()
        self._said: set[str] = set()
        self._local = threading.local()

    # Torch's hooks around modules.

    def before_module(self, module: torch.nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            observe_parameters(module)

    def behind_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            note_module(module, output)

    # At the saves.

    def saved(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_new: bool) -> None:
        """Of every managed save; where nothing is planned yet, what could be rebuilt is looked for."""
        if self._steps is None:
            self._encode()
        if node is not None:
            self._find_owners(node)
            note_saved(node, tensor.output_nr, packed)
        if is_new and self._steps is not None and self._steps.looks_for_rebuilds:
            self._look(packed, tensor, node, is_to_go=False)

    def drop(self, packed: PackedView, tensor: torch.Tensor, node: Any) -> bool:
        """The plan rebuilds it: gives it up, or as soon as its maker is known. False if it cannot be rebuilt."""
        return self._look(packed, tensor, node, is_to_go=True)

    def _look(self, packed: PackedView, tensor: torch.Tensor, node: Any, *, is_to_go: bool) -> bool:
        managed = packed.managed
        source = managed.source_storage
        if source is None or source.nbytes() != managed.nbytes:
            return False  # a part of a storage
        place = None if self._steps is None else self._steps.place
        recipe = None if node is None else find_recipe(tensor, node, self._our_unpack, max_depth=_DEPTH, dear=True)
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
        outcome = self._outcome(managed, recipe, place)
        if outcome is _Outcome.WRONG:
            return False
        if outcome is _Outcome.CLOSE:
            self._close.add(managed)
        if is_to_go:
            return managed.drop(recipe, is_exact=outcome is _Outcome.EXACT)
        inputs = [operand.managed for operand in recipe.operands]
        assert self._steps is not None, "who else looks"
        self._steps.can_be_rebuilt(managed, recipe.name, inputs, self._proofs[recipe.signature])
        return True

    # Codecs, as soon as the operation is over. Encoding is computing, before the hook that finds it.

    @contextlib.contextmanager
    def hook(self, transport: Transport) -> Iterator[None]:
        """Around all that a hook does to the device, where steps are watched."""
        assert self._steps is not None, "steps are watched"
        self._encode()
        with self._steps.hook(transport):
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
            if packed is not None and packed.managed.source_storage is not None:
                yield packed, one

    def _encode(self) -> None:
        for packed, one in self._complete_encodings(is_to_go=True):
            managed, steps = packed.managed, self._steps
            with contextlib.nullcontext() if steps is None else steps.rebuilding(managed.transport):
                if self._codec_proof(packed, one.codec) is None:
                    continue
                encoded = _encoded(packed, one.codec)
                if managed.drop(encoded, is_exact=one.codec.is_exact) and steps is not None and one.place is not None:
                    self._follow_encoded(encoded, one.place, steps)

    def _follow_encoded(self, encoded: Codec, place: SaveKey, steps: StepWatch) -> None:
        """In a plan what is left has a lifetime of its own, and may leave the device."""
        left, key = encoded.managed, key_of_encoded(place, encoded.name, encoded.kept_bytes)
        with steps.hook(left.transport):
            left.is_to_leave = steps.encoded(left, key) is Action.OFFLOAD
            left.complete(offloads=left.is_to_leave)

    def _look_at_encodings(self) -> None:
        assert self._steps is not None, "who else looks"
        for packed, one in self._complete_encodings(is_to_go=False):
            proof = self._codec_proof(packed, one.codec)
            if proof is not None:
                self._steps.can_be_rebuilt(packed.managed, one.codec.name, [], proof)

    def _codec_proof(self, packed: PackedView, codec: type[Codec]) -> Proof | None:
        """A codec sees nothing but the values: one proof holds for all of a geometry."""
        signature = codec.name, packed.geometry
        if signature not in self._proofs:
            gauges = None if self._steps is None else self._steps.gauges
            took_ns = took_bytes = 0
            with self._unnoticed():
                stream = packed.managed.transport.current_stream()
                if gauges is not None:
                    gauges.take_peaks()
                    before_bytes, begin = gauges.allocated_bytes(), gauges.mark(stream)
                recipe = _encoded(packed, codec)
                if gauges is not None:
                    took_ns = gauges.ns_between(begin, gauges.mark(stream))
                    took_bytes = gauges.take_peaks()[0] - before_bytes
                outcome, kept_bytes = self._try(packed.managed, recipe), recipe.kept_bytes
                del recipe
            if outcome is _Outcome.WRONG:
                return None
            proof = self._proofs[signature]
            given_up = {"kept_bytes": kept_bytes, "giving_up_ns": took_ns, "giving_up_bytes": took_bytes}
            self._proofs[signature] = replace(proof, **given_up)
        return self._proofs[signature]

    # See [Note: Proven once].

    def _outcome(self, managed: ManagedStorage, recipe: Recipe, place: SaveKey | None) -> _Outcome:
        key = None if place is None else (recipe.signature, place)
        if key is not None and key in self._places:
            return self._places[key]
        try:
            with self._unnoticed():
                outcome = self._try(managed, recipe)
        except torch.OutOfMemoryError:
            return _Outcome.WRONG  # this time
        except VdnnError as error:
            self._say_once(f"{error} It is not rebuilt.")
            outcome = _Outcome.WRONG
        if key is not None:
            self._places[key] = outcome
        return outcome

    def _unnoticed(self) -> contextlib.AbstractContextManager[None]:
        gauges = None if self._steps is None else self._steps.gauges
        return contextlib.nullcontext() if gauges is None else gauges.unnoticed()

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("vdnn: %s", sentence)

    def _try(self, managed: ManagedStorage, recipe: Recipe | Codec) -> _Outcome:
        """The first time that its signature is seen, its cost is found out too."""
        is_fake, is_known = managed.transport.fake, recipe.signature in self._proofs
        if is_fake and is_known:
            return _Outcome.EXACT
        gauges = None if self._steps is None else self._steps.gauges
        trial = Trial(managed, recipe, gauges)
        made = trial.run()
        outcome = _Outcome.EXACT if is_fake else self._compared(managed, recipe, made)
        if not is_known and outcome is not _Outcome.WRONG:
            del made
            if not is_fake and gauges is not None:
                trial.run()  # the first may have loaded and chosen kernels
            self._proofs[recipe.signature] = trial.proof
        return outcome

    def _compared(self, managed: ManagedStorage, recipe: Recipe | Codec, made: torch.Tensor) -> _Outcome:
        source, tolerance = managed.source_storage, self._tolerance
        if source is not None and is_as_it_was(recipe, source, made):
            return _Outcome.EXACT
        wanted = "bit for bit"
        if source is not None and tolerance.limit is not None and not isinstance(recipe, Codec):
            difference = difference_between(source, made.untyped_storage(), made.dtype)
            if tolerance.admits(difference):
                tolerance.follow(recipe.name, difference)
                return _Outcome.CLOSE
            wanted = f"within the tolerance of {tolerance.limit:g} ({difference:.2g} of the largest apart)"
        label = label_text(managed.geometry, managed.saved_in)
        self._say_once(f"{label} does not come out {wanted} by {recipe.name}: it is not rebuilt.")
        return _Outcome.WRONG


def _encoded(packed: PackedView, codec: type[Codec]) -> Codec:
    managed = packed.managed
    source = managed.source_storage
    assert source is not None, "it is there"
    return codec(packed.view_of(source, managed.begin), managed.transport, managed.counters)
