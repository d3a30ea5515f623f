"""What a session knows of rebuilding: recipes are found where tensors are saved, proven, told of, and followed.

[Note: Proven once] Before a recipe replaces a value it is tried on one that is there: rebuilt, and compared byte for
byte. That is done at every place of the step at which it is to be used: operations, scalars, shapes, strides, dtypes
and backend flags are what a recipe's signature says, but what a program writes behind autograd's back (under no_grad,
or through `.data`) into a value that nobody saves leaves no trace in the graph. One that differs is not followed at
that place again, and that is said once. What such a write does in some steps and not in others only integrity mode
finds. Where no steps are watched there are no places, and every value is compared. Of tensors without data nothing can
be: there recipes are believed, and only their cost is found out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from vdnn.errors import VdnnError
from vdnn.recording import SaveKey
from vdnn.runtime.codecs import LOSSLESS, Codec, codec_for
from vdnn.runtime.gauges import Gauges
from vdnn.runtime.holders import label_text
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.proof import Proof
from vdnn.runtime.recompute import Recipe, find_recipe, note_module, note_saved, observe_parameters, owner_recipe
from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.step_watch import StepWatch
from vdnn.runtime.transport import Transport

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


class Rebuilds:
    """Of one session. `our_unpack` is its hook."""

    def __init__(self, our_unpack: Callable[..., torch.Tensor], steps: StepWatch | None) -> None:
        self._codecs = LOSSLESS if steps is None else steps.ways.codecs
        self._our_unpack = our_unpack
        self._steps = steps
        self._proofs: dict[Hashable, Proof] = {}  # of recipes, by signature
        self._places: dict[tuple[Hashable, SaveKey], bool] = {}  # where they were tried, and whether they are right
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
            self._here().encodings.append(_Encoding(weakref.ref(packed), codec, is_to_go, _sequence_nr()))
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
        if any(operand.managed is managed for operand in recipe.operands):
            return False
        proof = self._proof(managed, recipe, place)
        if proof is None:
            return False
        if is_to_go:
            return managed.drop(recipe)
        inputs = [operand.managed for operand in recipe.operands]
        assert self._steps is not None, "who else looks"
        self._steps.can_be_rebuilt(managed, recipe.name, inputs, proof)
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

    def _complete_encodings(self, *, is_to_go: bool) -> Iterator[tuple[PackedView, type[Codec]]]:
        here = self._here()
        if not here.encodings:
            return
        now = _sequence_nr()
        ready = [one for one in here.encodings if one.is_to_go is is_to_go and one.sequence_nr != now]
        here.encodings = [one for one in here.encodings if one not in ready]
        for one in ready:
            packed = one.packed()
            if packed is not None and packed.managed.source_storage is not None:
                yield packed, one.codec

    def _encode(self) -> None:
        for packed, codec in self._complete_encodings(is_to_go=True):
            if self._codec_proof(packed, codec) is not None:
                packed.managed.drop(_encoded(packed, codec))

    def _look_at_encodings(self) -> None:
        assert self._steps is not None, "who else looks"
        for packed, codec in self._complete_encodings(is_to_go=False):
            proof = self._codec_proof(packed, codec)
            if proof is not None:
                self._steps.can_be_rebuilt(packed.managed, codec.name, [], proof)

    def _codec_proof(self, packed: PackedView, codec: type[Codec]) -> Proof | None:
        """A codec sees nothing but the values: one proof holds for all of a geometry."""
        signature = codec.name, packed.geometry
        if signature not in self._proofs:
            gauges = None if self._steps is None else self._steps.gauges
            took_ns = 0
            with self._unnoticed():
                stream = packed.managed.transport.current_stream()
                begin = None if gauges is None else gauges.mark(stream)
                recipe = _encoded(packed, codec)
                if gauges is not None:
                    took_ns = gauges.ns_between(begin, gauges.mark(stream))
                is_right, kept_bytes = self._is_right(packed.managed, recipe), recipe.kept_bytes
                del recipe
            if not is_right:
                return None
            proof = self._proofs[signature]
            self._proofs[signature] = replace(proof, kept_bytes=kept_bytes, giving_up_ns=took_ns)
        return self._proofs[signature]

    # See [Note: Proven once].

    def _proof(self, managed: ManagedStorage, recipe: Recipe, place: SaveKey | None) -> Proof | None:
        key = None if place is None else (recipe.signature, place)
        if key is None or key not in self._places:
            try:
                with self._unnoticed():
                    is_right = self._is_right(managed, recipe)
            except torch.OutOfMemoryError:
                return None  # another time
            except VdnnError as error:
                self._say_once(f"{error} It is not rebuilt.")
                is_right = False
            if key is None:
                return self._proofs[recipe.signature] if is_right else None
            self._places[key] = is_right
        return self._proofs[recipe.signature] if self._places[key] else None

    def _unnoticed(self) -> contextlib.AbstractContextManager[None]:
        gauges = None if self._steps is None else self._steps.gauges
        return contextlib.nullcontext() if gauges is None else gauges.unnoticed()

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("vdnn: %s", sentence)

    def _is_right(self, managed: ManagedStorage, recipe: Recipe | Codec) -> bool:
        """Tries it. The first time that its signature is seen, its cost is found out too."""
        is_fake, is_known = managed.transport.fake, recipe.signature in self._proofs
        if is_fake and is_known:
            return True
        gauges = None if self._steps is None else self._steps.gauges
        trial = _Trial(managed, recipe, gauges)
        made = trial.run()
        source = managed.source_storage
        if not is_fake and (source is None or not _is_as_it_was(recipe, source, made)):
            label = label_text(managed.geometry, managed.saved_in)
            self._say_once(f"{label} does not come out bit for bit by {recipe.name}: it is not rebuilt.")
            return False
        if not is_known:
            del made
            if not is_fake and gauges is not None:
                trial.run()  # the first may have loaded and chosen kernels
            self._proofs[recipe.signature] = trial.proof
        return True


class _Trial:
    """A rebuild outside of any plan, and what it costs."""

    def __init__(self, managed: ManagedStorage, recipe: Recipe | Codec, gauges: Gauges | None) -> None:
        self._managed = managed
        self._recipe = recipe
        self._gauges = gauges
        self._stand_ins: list[torch.Tensor] = []
        self.proof = Proof(0, 0)

    def run(self) -> torch.Tensor:
        gauges, transport = self._gauges, self._managed.transport
        if gauges is None:
            return self._recipe.rebuild(self._operand)
        self._begin()
        made = self._recipe.rebuild(self._operand)
        end = gauges.mark(transport.current_stream())
        extra_bytes = gauges.take_peaks()[0] - self._before_bytes
        self.proof = Proof(gauges.ns_between(self._begin_mark, end), max(extra_bytes, self._managed.nbytes))
        self._stand_ins.clear()
        return made

    def _begin(self) -> None:
        gauges = self._gauges
        if gauges is not None:
            gauges.take_peaks()
            self._before_bytes = gauges.allocated_bytes()
            self._begin_mark = gauges.mark(self._managed.transport.current_stream())

    def _operand(self, packed: Any) -> torch.Tensor:
        """All are asked for before anything is computed: what that costs is no part of it."""
        view: PackedView = packed
        if view.managed.transport.fake:
            dtype, size, stride = view.geometry
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            self._stand_ins.append(tensor)  # in a step the operand stays, whoever has read it
        else:
            tensor = view.unpack()
        self._begin()
        return tensor


def _encoded(packed: PackedView, codec: type[Codec]) -> Codec:
    managed = packed.managed
    source = managed.source_storage
    assert source is not None, "it is there"
    return codec(packed.view_of(source, managed.begin), managed.transport)


def _is_as_it_was(recipe: Recipe | Codec, source: torch.UntypedStorage, made: torch.Tensor) -> bool:
    """Byte for byte; what a lossy codec made, within its bound."""
    storage = made.untyped_storage()
    if source.nbytes() != storage.nbytes():
        return False
    dtype = torch.uint8 if recipe.is_exact else made.dtype
    with torch.no_grad():
        first, second = (torch.empty(0, dtype=dtype, device=made.device).set_(one) for one in (source, storage))
        return bool(recipe.is_close(first, second)) if isinstance(recipe, Codec) else torch.equal(first, second)
