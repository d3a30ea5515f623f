"""The hooks of settled steps: the native gate, and the points of such a step that the gate leaves to Python.

The gate has compared a save or a use with the script before it calls here. The facts that it cannot read are compared
here: the producer, the shape, the exemptions. On any difference these hooks change nothing, and the packer's own hooks
continue in the middle of the step.

[Note: Order of a recompute] A recompute uses what it reads, each use at a point of its own, and these points come
before that of the use that needs it. So the gate calls for that use while it expects the first of them. They are served
one after another inside the recompute. If one of them is not as in the script, the packer's hooks continue from there,
and so does the recompute. Bytes are encoded at the first hook after their operation.

[Note: Kept saves] The gate keeps a save as autograd does, so a guard cannot evict it. That is right as long as the step
is the settled one. A step that differs may take more, and a graph may outlive its step: then its saves are managed like
all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.runtime.recompute import note_saved, observe_flags_at_save
from vdnn.runtime.recompute.backend_flags import torch_settings
from vdnn.runtime.recompute.node_notes import NativeSave
from vdnn.runtime.recompute.readers import may_be_overwritten
from vdnn.runtime.session.light_storages import LightStorages
from vdnn.runtime.session.missing import recomputed
from vdnn.runtime.session.saves import Saves
from vdnn.runtime.session.unplanned_hooks import UnplannedHooks
from vdnn.runtime.steps.settling import SettledStep
from vdnn.runtime.steps.step_script import NO_LIFETIME, EventKind, ScriptEvent
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.storage.kept import unpack_kept
from vdnn.runtime.storage.packed_view import PackedView, full_view
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out, refuse_capture
from vdnn.runtime.torch_internals.tensor_kinds import is_traced, num_dispatch_modes, transform_level
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

_set_grad_mode = torch._C._set_grad_enabled
_Base = torch._C.TensorBase
_KEEP, _, *_DISCARDS = Action
_USES = (EventKind.FETCH, EventKind.OPERAND)  # the gate hands an operand over if it cannot serve it


class SettledHooks:
    """The gate of one session, which calls the methods of this class at the points of a settled step. `pack` and
    `unpack` are the hooks of all other steps."""

    def __init__(
        self,
        saves: Saves,
        watch: StepWatch,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        min_bytes: int,
    ) -> None:
        self._saves = saves
        self._watch = watch
        self._settling = watch.settling
        self._pack, self._unpack = pack, unpack
        self._has_cuda = torch.cuda.is_available()
        self._light = watch.settling.light = LightStorages(saves, watch, self._recipe_for, self._restore_light)
        self._settling.manage_kept = self._manage_kept
        self._unplanned = watch.settling.unplanned = UnplannedHooks(saves, watch, min_bytes)
        self.gate = watch.settling.gate = _C.Gate(
            pack,
            unpack,
            self._save,
            self._use,
            self._moved,
            saves.readers.discarded,
            _Base._version,
            _Base.is_leaf,
            _Base.nbytes,
            _Base.dtype,
            _Base.detach,
            torch._C._current_graph_task_id,
            torch_settings,
            _Base.grad_fn,
            _Base.output_nr,
            self._light.mover,
            self._unplanned.native,
        )

    def cut(self) -> None:
        """The gate is closed for ever, and graphs may hold it: it no longer has anything that leads back to it."""
        self._settling.cut()
        self._light.cut()
        self._unplanned.cut()
        del self.gate, self._unplanned, self._pack, self._unpack

    # Called by the gate.

    def _save(self, tensor: torch.Tensor, index: int) -> object:
        """A save that the gate neither keeps nor moves, at this event of the script."""
        saves = self._saves
        if saves.in_forked_child:
            return self._pack_in_python(tensor)
        try:
            with saves.lock:
                packed = self._planned_save(tensor, index)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted] in hooks.py
            raise
        return self._pack_in_python(tensor) if packed is None else packed

    def _pack_in_python(self, tensor: torch.Tensor) -> object:
        packed = self._pack(tensor)
        return self.gate.pack(tensor) if packed is None else packed  # another settled step begins

    def _use(self, packed: PackedView | _C.LightSave, index: int) -> torch.Tensor:
        """A use of a save that the gate neither keeps nor moves."""
        saves = self._saves
        if isinstance(packed, _C.LightSave):
            packed = full_view(packed)
        if saves.in_forked_child:
            return self._unpack(packed)
        with saves.lock:
            has_grad_mode = torch.is_grad_enabled()
            try:
                tensor = self._planned_use(packed, index)
            finally:
                _set_grad_mode(has_grad_mode)
        return self._unpack(packed) if tensor is None else tensor

    def _moved(self, index: int) -> None:
        """The gate has served this event, and the plan moves something there, or copies wait for this hook."""
        saves = self._saves
        if saves.in_forked_child:
            return
        with saves.lock:
            followed = self._settling.followed
            if followed is not None and not followed.needs_replay:
                self._encode(followed, index)
                self._make_planned(followed, followed.script.events[index])
                self.look_again()

    # At a save or use that is as planned.

    def _planned_save(self, tensor: torch.Tensor, index: int) -> PackedView | None:
        saves, followed, transport = self._saves, self._settling.followed, self._watch.transport
        if followed is None or transport is None or not self._is_at(index):
            return None
        if tensor.device != transport.torch_device or transform_level() is not None:
            return None
        if num_dispatch_modes() and is_traced():
            return None
        event = followed.script.events[index]
        if followed.executor.recomputes:
            observe_flags_at_save(tensor)
        node, storage = tensor.grad_fn, tensor.untyped_storage()
        if not _has_key(tensor, node, event.key) or saves.exemptions.always(tensor, storage, node) is not None:
            return None
        if self._has_cuda:
            refuse_capture()
        if not self._encode(followed, index):
            return None
        saves.deferred.submit_finished(transport)
        self._light.mover.python_manages(storage._cdata)
        packed, is_new = saves.manage(tensor, tensor, storage, node, transport)
        managed, watched = packed.managed, packed.managed.watched
        is_known = watched is not None and watched.observer is followed.step and watched.number == event.lifetime
        if is_new is not event.is_new or not (is_new or is_known) or managed.nbytes != event.storage_bytes:
            return saves.follow(tensor, storage, node, (packed, is_new))
        followed.step.save_key, followed.step.save_form = event.key, event.form
        action = None if event.planned is None else followed.executor.plan.lifetimes[event.planned].action
        if is_new and action in _DISCARDS and not saves.discards(packed, tensor, node):
            if saves.recipes is not None:
                saves.recipes.not_found()
            return saves.follow(tensor, storage, node, (packed, is_new))
        self.gate.advance()
        if is_new and event.planned is not None and action is not None:
            followed.step.begin_planned(managed, event.lifetime, event.planned)
            followed.executor.follow(event.planned, managed)
            managed.action = action
            saves.deferred.when_complete(managed, node)
            if action is _KEEP:
                saves.counters.keep(followed.executor.kept_for(event.planned), managed.nbytes)
        if saves.recipes is not None and followed.executor.recomputes:
            saves.recipes.saved(packed, tensor, node, is_new=is_new)
        self._act(followed, index)
        return packed

    def _planned_use(self, packed: PackedView, index: int) -> torch.Tensor | None:
        saves, followed, transport = self._saves, self._settling.followed, self._watch.transport
        if followed is None or transport is None or not self._is_at(index) or type(packed) is not PackedView:
            return None
        if transform_level() is not None or not self._prepare(packed):
            return None
        event, index = self._expected(followed), self.gate.position
        if event is None or event.kind not in _USES or not _is_lifetime(followed, event, packed):
            return None
        if self._has_cuda:
            refuse_capture()
        if not self._encode(followed, index):
            return None
        tensor = saves.unpacked(packed)
        self.gate.advance()
        self._act(followed, index)
        return tensor

    def _is_at(self, index: int) -> bool:
        return self.gate.is_open and self.gate.position == index

    def _act(self, followed: SettledStep, index: int) -> None:
        """Issues the moves of the plan at this event, which Python has served."""
        event = followed.script.events[index]
        if event.moves:
            self.gate.make_moves(index, False)
        self._make_planned(followed, event)
        if event.moves:
            self.gate.make_moves(index, True)
        self.look_again()

    def _make_planned(self, followed: SettledStep, event: ScriptEvent) -> None:
        """Issues the moves that are Python's."""
        deferred, transport = self._saves.deferred, self._watch.transport
        if transport is None:
            return
        if deferred.number:
            deferred.submit_finished(transport)
        if event.moves:
            followed.executor.make_planned(event.moves)

    def look_again(self) -> None:
        """From now on the gate calls at each point, if something waits for the next one."""
        if self.gate.is_open:
            self.gate.calls_python = self._saves.deferred.number > 0 or self._are_waiting

    def _manage_kept(self, followed: SettledStep) -> None:
        """Manages the saves that the gate has kept in this step and that are alive: see [Note: Kept saves]. A save that
        was written to stays as it is, because its use raises an error. Called under the lock, while the gate is
        closed."""
        transport = self._watch.transport
        if transport is None:
            return
        for save in self.gate.saves():
            if save.step == self.gate.step and save.tensor._version == save.version:
                self._manage_kept_save(save, followed, transport)
        self._saves.readers.forget_index()

    def _manage_kept_save(self, save: _C.KeptSave, followed: SettledStep, transport: Transport) -> None:
        saves, tensor = self._saves, save.tensor
        packed, is_new = saves.manage(tensor, tensor, tensor.untyped_storage(), None, transport)
        managed, planned = packed.managed, followed.script.planned.get(save.lifetime)
        if is_new:
            managed.action = _KEEP
            followed.step.begin_planned(managed, save.lifetime, planned)
            if planned is not None:
                followed.executor.follow(planned, managed)
            followed.step.guard_passed(managed, save.lifetime)
        else:
            saves.counters.shared_saves -= 1  # the script has counted it
        save.replace(packed)

    # At a use that the gate does not serve.

    def use_kept(self, save: _C.KeptSave) -> torch.Tensor:
        """A save that the gate kept is used where the gate did not expect it, or a recompute may read it."""
        saves, watch, transport = self._saves, self._watch, self._watch.transport
        if isinstance(save.tensor, PackedView):
            return self._unpack(save.tensor)
        if saves.in_forked_child or transport is None:
            return unpack_kept((save.tensor, save.version))
        with saves.lock:
            has_grad_mode = torch.is_grad_enabled()
            try:
                saves.missing.before_use(save)
                if isinstance(save.tensor, PackedView):  # from then on
                    return self._unpack(save.tensor)
                tensor = unpack_kept((save.tensor, save.version))
                if self._is_used_as_planned(save):
                    return tensor
                with watch.hook(transport):
                    saves.deferred.submit_finished(transport)
                    watch.used_kept(save)
            finally:
                _set_grad_mode(has_grad_mode)
            saves.counters.uses += 1
            saves.counters.used_in_place += 1
        return tensor

    def _is_used_as_planned(self, save: _C.KeptSave) -> bool:
        """Goes on behind the use of a save that the gate kept, if the gate expects that use."""
        followed, index = self._settling.followed, self.gate.position
        event = None if followed is None else self._expected(followed)
        if followed is None or event is None or event.kind is not EventKind.USE:
            return False
        if save.step != self.gate.step or save.lifetime != event.lifetime or transform_level() is not None:
            return False
        if not self._encode(followed, index):
            return False
        self.gate.advance()
        self._act(followed, index)
        return True

    # Recomputes and encoded bytes.

    @property
    def _are_waiting(self) -> bool:
        """True if something is to be encoded at the next hook."""
        recipes = self._saves.recipes
        return recipes is not None and recipes.are_waiting

    def _encode(self, followed: SettledStep, index: int) -> bool:
        """Encodes what waits for this event of the script. False if that differs from the script."""
        event, recipes = followed.script.events[index], self._saves.recipes
        if recipes is None or not (recipes.are_waiting or event.encoded) or followed.encoded_at == index:
            return True
        followed.to_encode, followed.encoded_at = event.encoded, index
        recipes.encode_complete()
        is_right = not followed.to_encode and self.gate.is_open
        followed.to_encode = ()
        return is_right

    # What the gate discards and recomputes by itself: see [Note: Order of a recompute].

    def _recipe_for(self, tensor: torch.Tensor, save: _C.LightSave, index: int) -> _C.CountedRecipe | None:
        """The recipe for this save of a settled step. None if it is not known to be exact here, or is to be checked:
        then the save is Python's."""
        followed, saves = self._light.followed, self._saves
        recipes, node = saves.recipes, tensor.grad_fn
        if followed is None or recipes is None or node is None:
            return None
        try:
            event = followed.script.events[index]
            key = event.key
            observe_flags_at_save(tensor)
            if key is None or ((event.encoded or recipes.are_waiting) and not self._encode(followed, index)):
                return None
            followed.step.save_key, followed.step.save_form = key, event.form
            recipe = recipes.proven(tensor, node, key, followed.script.proven, index, self._watch.transport)
            if recipe is None:
                return None
            if event.is_read:
                note_saved(node, tensor.output_nr, save)
            saves.readers.forget_index()
            return _C.CountedRecipe(recipe)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted] in hooks.py
            raise

    def _restore_light(self, save: _C.LightSave) -> None:
        """Recomputes the storage of a save that the gate discarded and is about to return. If that fails, Python's hook
        tries again, and raises."""
        has_grad_mode = torch.is_grad_enabled()
        try:
            counted: _C.CountedRecipe = save.recipe
            if counted.needs_recomputes:
                self._saves.missing.recompute_for(save)
            else:
                # The code that uses the save only reads, so the gate itself serves its saves as operands.
                is_native = not counted.recipe.operands
                save.restore(recomputed(save, self.gate.unpack if is_native else self.unpack_operand))
        except VdnnError:
            return
        finally:
            _set_grad_mode(has_grad_mode)

    def unpack_operand(self, packed: PackedView | NativeSave) -> torch.Tensor:
        """Unpacks the operands of a recompute."""
        followed = self._settling.followed
        tensor = None if followed is None else self._planned_operand(followed, packed)
        if tensor is None:
            tensor = self._unpack(packed)
            self._settling.used_operand(packed)
        return tensor

    def _planned_operand(self, followed: SettledStep, packed: PackedView | NativeSave) -> torch.Tensor | None:
        event = self._expected(followed)
        if event is None or event.kind is not EventKind.OPERAND or transform_level() is not None:
            return None
        if isinstance(packed, _C.LightSave):
            tensor: torch.Tensor = self.gate.unpack(packed)  # which knows its lifetime
            return tensor
        index = self.gate.position
        if isinstance(packed, _C.KeptSave):
            if packed.step != self.gate.step or packed.lifetime != event.lifetime:
                return None
        elif not _is_lifetime(followed, event, packed) or not self._prepare(packed):
            return None
        if not self._is_at(index) or not self._encode(followed, index):
            return None
        if isinstance(packed, _C.KeptSave):
            tensor = unpack_kept((packed.tensor, packed.version))
            self._saves.counters.uses += 1
            self._saves.counters.used_in_place += 1
        else:
            tensor = self._saves.unpacked(packed)
        self.gate.advance()
        self._act(followed, index)
        return tensor

    def _expected(self, followed: SettledStep) -> ScriptEvent | None:
        """The next event of the settled step, if this thread uses what the step saved."""
        gate, events = self.gate, followed.script.events
        return events[gate.position] if gate.is_open and gate.uses_here and gate.position < len(events) else None

    def _prepare(self, packed: PackedView) -> bool:
        """Prepares a use: recomputes discarded bytes, and everything that reads bytes which the use may overwrite.
        False if the packer's own hook has to do it."""
        managed = packed.managed
        if may_be_overwritten():
            if managed.container is not None:
                return False
            managed.keep_reloaded()  # as in the packer's own hook
        self._saves.restore(managed)
        return True


def _has_key(tensor: torch.Tensor, node: torch.autograd.graph.Node | None, key: SaveKey | None) -> bool:
    """True if a save has this key, whose module and dtype were compared."""
    return (
        key is not None
        and ("" if node is None else node.name()) == key.producer
        and tuple(tensor.shape) == key.size
        and tuple(tensor.stride()) == key.stride
    )


def _is_lifetime(followed: SettledStep, event: ScriptEvent, packed: PackedView) -> bool:
    """True if this is the lifetime of the event, in the step that runs."""
    watched = packed.managed.watched
    if watched is None or watched.observer is not followed.step:
        return False
    if event.lifetime == NO_LIFETIME:
        return watched.number is None and watched.planned == event.planned
    return watched.number == event.lifetime


for hook in (SettledHooks._save, SettledHooks._use, SettledHooks._moved, SettledHooks.use_kept):
    keep_dynamo_out(hook)
