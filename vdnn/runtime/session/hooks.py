"""The pack and unpack hooks: pack receives a tensor that autograd saves, unpack returns it at a use.

[Note: Shards] A DTensor wraps its local part, a plain tensor. That part may move like any other tensor, and a use wraps
it again. An in-place write through a DTensor counts on the wrapper's version only, so a use also compares that version.
Wrappers that nobody wrote through share the managed storage of their part and its version counter (a layer's input is
wrapped anew for each of q, k and v). No recipe is searched for a shard.

[Note: Interrupted] Ctrl-C may interrupt a hook between any two bytecodes, including those of `with torch.no_grad()`. So
a hook restores the grad mode itself, by a native call in a `finally`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn._C import KeptSave, LightSave
from vdnn.errors import VdnnError
from vdnn.runtime.recompute import observe_flags_at_save
from vdnn.runtime.recompute.readers import may_be_overwritten
from vdnn.runtime.recompute.rechecks import Rechecks
from vdnn.runtime.recompute.tolerance import Tolerance
from vdnn.runtime.session.missing import Missing
from vdnn.runtime.session.saves import Saves
from vdnn.runtime.session.session_recipes import SessionRecipes
from vdnn.runtime.session.settled_hooks import SettledHooks
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.kept import KeptTensor, pack_kept, unpack_kept, unpack_without_hooks
from vdnn.runtime.storage.packed_view import PackedShard, PackedView, full_view
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out, refuse_capture
from vdnn.runtime.torch_internals.hooks_of_others import HooksOfASession
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.tensor_kinds import (
    CLASSES_WITH_DATA,
    is_traced,
    num_dispatch_modes,
    outside_of_transforms,
    plain_part,
    transform_level,
)
from vdnn.runtime.training_state.parameters.packed_parameter import ParameterSaves, hooks_of

Packed = KeptTensor | KeptSave | LightSave | PackedView | PackedShard
_STRIDED = torch.strided
_set_grad_mode = torch._C._set_grad_enabled
_Node = torch.autograd.graph.Node
_Storage = torch.UntypedStorage


class Packer:
    """The hooks of one session. Its methods run inside autograd, on any thread."""

    def __init__(
        self,
        saves: Saves,
        min_bytes: int,
        modules: ModuleWatch,
        tolerance: Tolerance,
        rechecks: Rechecks,
        parameters: ParameterSaves | None = None,
    ) -> None:
        self.saves = saves
        self._min_bytes = max(min_bytes, 1)  # an empty tensor has nothing to move
        self._watch = saves.watch
        self._parameters = parameters
        self._forks, self._has_cuda = forks.count, torch.cuda.is_available()
        settled = (
            None if saves.watch is None else SettledHooks(saves, saves.watch, self.pack, self.unpack, self._min_bytes)
        )
        self._settled = settled
        self._hooks = self if settled is None else settled.gate
        self.pack_hook, self.unpack_hook = hooks_of(self._hooks, parameters)
        steps, readers, unpack = saves.steps, saves.readers, self.unpack_hook
        if steps.recomputes:
            saves.recipes = SessionRecipes(unpack, steps, tolerance, rechecks, readers, modules.running)
            if saves.watch is not None:
                saves.watch.settling.leaves = saves.recipes.leaves
        saves.missing = Missing(self.unpack if settled is None else settled.unpack_operand, steps, readers)
        saves.after_save = None if settled is None else settled.look_again

    def manage_parameters(self, parameters: ParameterSaves) -> None:
        """Makes hooks that pack views of these, for who installs them from now on. Those from before go on to serve."""
        self._parameters = parameters
        self.pack_hook, self.unpack_hook = hooks_of(self._hooks, parameters)
        if self.saves.recipes is not None:
            self.saves.recipes.our_unpack = self.unpack_hook

    def hooks(self) -> HooksOfASession:
        """For a session that is entered."""
        return HooksOfASession(self.pack_hook, self.unpack_hook, streams=self._parameters is not None)

    def watch_modules(self) -> Iterator[Callable[[], None]]:
        """Notes at module calls what recipes need. Yields what ends that, for the session that installs this."""
        if self.saves.recipes is not None:
            yield from self.saves.recipes.watch_modules(None if self._settled is None else self._settled.gate)

    # The end, see abandoned.py.

    def leave_settled_step(self) -> None:
        """From now on Python serves the running step."""
        if self._watch is not None:
            self._watch.settling.leave()

    def cut(self) -> None:
        """Cuts the cycles of references between the parts. Graphs may still use kept saves, and nothing else."""
        del self.pack_hook, self.unpack_hook, self._hooks
        if self._parameters is not None:
            self._parameters.cut()
        self.saves.cut()
        settled, self._settled = self._settled, None
        if settled is not None:
            settled.cut()

    # Saving.

    def pack(self, tensor: torch.Tensor) -> Packed | None:
        """None for the first save of a settled step: the gate, which has opened, serves it."""
        saves = self.saves
        counters = saves.counters
        counters.saves += 1
        # Small tensors dominate: the cheapest tests that find them come first.
        part = tensor
        if type(tensor) not in CLASSES_WITH_DATA or tensor.layout is not _STRIDED:
            found = plain_part(tensor)  # see [Note: Shards]
            if found is None:
                return self._pass_through(tensor, 0)
            part = found
        try:
            storage = part.untyped_storage()
        except NotImplementedError:  # torch.func wraps it
            return self._keep(tensor, Kept.SUBCLASS, 0)
        nbytes = part.nbytes
        counters.saved_bytes += nbytes
        # Test the size of the storage, not of the view: a small view may be the last holder of a large storage.
        if storage.nbytes() < self._min_bytes or not nbytes:
            return self._keep(tensor, Kept.SMALL, nbytes)
        if saves.recipes is not None:
            observe_flags_at_save(tensor)
        node = tensor.grad_fn  # read once: each read makes a Python object
        reason = saves.exemptions.always(tensor, storage, node)
        if reason is not None:
            if reason is Kept.PARAMETER and self._watch is not None and self._watch.has_guard_alone:
                self._make_room_for_product(tensor, self._watch)
            return self._keep(tensor, reason, nbytes)
        if part.is_quantized or part.is_nested:
            return self._pass_through(tensor, nbytes)
        if part._is_zerotensor() or transform_level() is not None:
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        if num_dispatch_modes() and is_traced():
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        if forks.count != self._forks:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        try:
            with saves.lock:
                packed = self._pack_movable(tensor, part, storage, node, nbytes)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted]; else autograd would save nothing
            raise
        if packed is None:
            counters.saves -= 1  # the script counts it
            counters.saved_bytes -= nbytes
            return None
        return packed if part is tensor or isinstance(packed, tuple) else PackedShard(packed, tensor)

    def _make_room_for_product(self, weight: torch.Tensor, watch: StepWatch) -> None:
        """`weight` stays. The operation that saves it may make much more of it."""
        if forks.count != self._forks or transform_level() is not None:
            return
        nbytes = watch.passed_weight(weight)
        if not nbytes:
            return
        try:
            with self.saves.lock:
                watch.make_room_for_product(nbytes)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted]
            raise

    def _pass_through(self, tensor: torch.Tensor, nbytes: int) -> KeptTensor:
        """Keeps a tensor that is not plain memory. An unknown subclass may hold any other tensors: 0 bytes."""
        watch = self._watch
        if watch is not None and watch.notes_what_passes_through and not self.saves.in_forked_child and not is_traced():
            with self.saves.lock:
                transport = self.saves.transports[tensor.device]
                if transport is not None:
                    watch.passes_through(transport)
        return self._keep(tensor, Kept.SUBCLASS, nbytes)

    def _pack_movable(
        self, tensor: torch.Tensor, part: torch.Tensor, storage: _Storage, node: _Node | None, nbytes: int
    ) -> KeptTensor | PackedView | None:
        saves = self.saves
        transport = saves.transports[part.device]
        if transport is None:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        if transport.fake is not (type(part) is FakeTensor):
            if transport.fake:
                raise VdnnError(
                    "a tensor with data was saved, and the VirtualMachine of this session has none. Make the model and "
                    "its inputs inside `with machine:`, or make the machine with fake=False."
                )
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        if not saves.manages:
            return self._keep(tensor, Kept.POLICY, nbytes)
        if self._has_cuda:
            refuse_capture()
        watch = self._watch
        if watch is None:
            return saves.save(tensor, part, storage, node, transport)
        watch.before_save()
        with (saves.recipes or watch).hook(transport):
            may_begin = watch.is_before_first_save and part is tensor and not saves.table.knows(storage)
            if may_begin and watch.begins_settled(tensor, node, saves.counters):
                if saves.after_save is not None:
                    saves.after_save()
                return None
            return saves.save(tensor, part, storage, node, transport)

    def _keep(self, tensor: torch.Tensor, reason: Kept, nbytes: int) -> KeptTensor:
        counters = self.saves.counters
        counters.kept[reason] += 1
        counters.kept_bytes[reason] += nbytes
        return pack_kept(tensor)

    # Using.

    def unpack(self, packed: Packed) -> torch.Tensor:
        saves = self.saves
        if isinstance(packed, tuple):
            readers = saves.readers  # as `are_there`, without a call: most saves are of this kind
            are_there = readers.discarded or (readers.mover is not None and readers.mover.has_discarded)
            if are_there and forks.count == self._forks:
                with saves.lock:
                    saves.missing.before_use(packed[0])
            return unpack_kept(packed)
        if type(packed) is KeptSave:
            return unpack_without_hooks(packed) if self._settled is None else self._settled.use_kept(packed)
        if type(packed) is LightSave:
            packed = full_view(packed)
        if forks.count != self._forks:
            return packed.unpack()
        if transform_level() is not None:
            with saves.lock, outside_of_transforms():
                return self._use(packed)
        with saves.lock:
            if self._watch is None and packed.managed.discarded is None:
                return self._use(packed)
            has_grad_mode = torch.is_grad_enabled()
            try:
                return self._use(packed)
            finally:
                _set_grad_mode(has_grad_mode)  # see [Note: Interrupted]

    def _use(self, packed: PackedView | PackedShard) -> torch.Tensor:
        if self._has_cuda:
            refuse_capture()
        saves, overwritten = self.saves, may_be_overwritten()
        if overwritten and packed.managed.container is not None:
            (packed if isinstance(packed, PackedView) else packed.view).move_to_container()
        managed = packed.managed
        if overwritten:
            managed.keep_reloaded()  # its uses must return the same memory: each sees writes through the others
        if managed.discarded is not None or saves.readers.are_there:
            saves.restore(managed)
        watch = self._watch
        if watch is None:
            tensor = saves.unpacked(packed)
            saves.lookahead.used(managed)
            return tensor
        with (saves.recipes or watch).hook(managed.transport):
            tensor = saves.unpacked(packed)
            if not watch.used(managed):
                saves.lookahead.used(managed)
        return tensor


keep_dynamo_out(Packer.pack)
keep_dynamo_out(Packer.unpack)
