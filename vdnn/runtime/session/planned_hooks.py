"""The hooks of settled steps: the native gate, and the points of such a step at which the plan acts.

The gate has compared a save or a use with the script before it calls here. What it cannot read is compared here: the
producer, the shape, the exemptions. On any difference these hooks change nothing, and the packer's own hooks continue
in the middle of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vdnn import _C
from vdnn.runtime.recompute import observe_flags_at_save
from vdnn.runtime.recompute.backend_flags import torch_settings
from vdnn.runtime.recompute.readers import Readers
from vdnn.runtime.session.kept_saves import manage_kept
from vdnn.runtime.session.light_storages import LightStorages, full_view
from vdnn.runtime.session.planned_recomputes import PlannedRecomputes, is_lifetime
from vdnn.runtime.steps.settling import Followed
from vdnn.runtime.steps.step_script import Event, EventKind
from vdnn.runtime.steps.watch import StepWatch
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.kept import kept_tensor
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out, refuse_capture
from vdnn.runtime.torch_internals.tensor_kinds import is_traced, num_dispatch_modes, transform_level
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

if TYPE_CHECKING:
    from vdnn.runtime.session.hooks import Packer

_set_grad_mode = torch._C._set_grad_enabled
_Base = torch._C.TensorBase
_KEEP, _, *_DISCARDS = Action
_USES = (EventKind.FETCH, EventKind.OPERAND)  # the gate hands an operand over if it cannot serve it


class PlannedHooks:
    """The gate of one session, which calls the methods of this class at the points of a settled step."""

    def __init__(self, packer: Packer, watch: StepWatch, readers: Readers) -> None:
        self.packer = packer
        self._watch = watch
        self._settling = watch.settling
        self._has_cuda = torch.cuda.is_available()
        self.recomputes = PlannedRecomputes(self, watch.settling)
        self._light = watch.settling.light = LightStorages(packer, watch, self.recomputes)
        self._settling.manage_kept = self._manage_kept
        self.gate = watch.settling.gate = _C.Gate(
            packer.pack,
            packer.unpack,
            self._save,
            self._use,
            self._moved,
            readers.discarded,
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
        )

    def cut(self) -> None:
        """The gate is closed for ever, and graphs may hold it: it no longer has anything that leads back to it."""
        self._settling.cut()
        self._light.cut()
        del self.gate, self.recomputes

    @property
    def transport(self) -> Transport | None:
        return self._watch.transport

    # Called by the gate.

    def _save(self, tensor: torch.Tensor, index: int) -> object:
        """A save that the gate neither keeps nor moves, at this event of the script."""
        packer = self.packer
        if packer.in_forked_child:
            return packer.pack(tensor)
        try:
            with packer.lock:
                packed = self._planned_save(tensor, index)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted] in hooks.py
            raise
        return packer.pack(tensor) if packed is None else packed

    def _use(self, packed: PackedView | _C.LightSave, index: int) -> torch.Tensor:
        """A use of a save that the gate neither keeps nor moves."""
        packer = self.packer
        if isinstance(packed, _C.LightSave):
            packed = full_view(packed)
        if packer.in_forked_child:
            return packer.unpack(packed)
        with packer.lock:
            has_grad_mode = torch.is_grad_enabled()
            try:
                tensor = self._planned_use(packed, index)
            finally:
                _set_grad_mode(has_grad_mode)
        return packer.unpack(packed) if tensor is None else tensor

    def _moved(self, index: int) -> None:
        """The gate has served this event, and the plan moves something there, or copies wait for this hook."""
        packer = self.packer
        if packer.in_forked_child:
            return
        with packer.lock:
            followed = self._settling.followed
            if followed is not None and not followed.needs_replay:
                self.recomputes.encode(followed, index)
                self._make_planned(followed, followed.script.events[index])
                self.look_again()

    # At a save or use that is as planned.

    def _planned_save(self, tensor: torch.Tensor, index: int) -> PackedView | None:
        packer, followed, transport = self.packer, self._settling.followed, self._watch.transport
        if followed is None or transport is None or not self.is_at(index):
            return None
        if tensor.device != transport.torch_device or transform_level() is not None:
            return None
        if num_dispatch_modes() and is_traced():
            return None
        event = followed.script.events[index]
        if followed.executor.recomputes:
            observe_flags_at_save()
        node, storage = tensor.grad_fn, tensor.untyped_storage()
        if not _has_key(tensor, node, event.key) or packer.exemptions.always(tensor, storage, node) is not None:
            return None
        if self._has_cuda:
            refuse_capture()
        if not self.recomputes.encode(followed, index):
            return None
        packer.deferred.submit_finished(transport)
        self._light.mover.python_manages(storage._cdata)
        packed, is_new = packer.manage(tensor, storage, node, transport)
        managed, watched = packed.managed, packed.managed.watched
        is_known = watched is not None and watched.observer is followed.step and watched.number == event.lifetime
        if is_new is not event.is_new or not (is_new or is_known) or managed.nbytes != event.storage_bytes:
            return packer.follow(tensor, storage, node, transport, (packed, is_new))
        followed.step.save_key, followed.step.save_form = event.key, event.form
        action = None if event.planned is None else followed.executor.plan.lifetimes[event.planned].action
        if is_new and action in _DISCARDS and not packer.discards(packed, tensor, node):
            if packer.recipes is not None:
                packer.recipes.not_found()
            return packer.follow(tensor, storage, node, transport, (packed, is_new))
        self.gate.advance()
        if is_new and event.planned is not None and action is not None:
            followed.step.begin_planned(managed, event.lifetime, event.planned)
            followed.executor.follow(event.planned, managed)
            managed.action = action
            packer.deferred.when_complete(managed, node)
            if action is _KEEP:
                packer.counters.keep(Kept.PLAN, managed.nbytes)
        if packer.recipes is not None and followed.executor.recomputes:
            packer.recipes.saved(packed, tensor, node, is_new=is_new)
        self.act(followed, index)
        return packed

    def _planned_use(self, packed: PackedView, index: int) -> torch.Tensor | None:
        packer, followed, transport = self.packer, self._settling.followed, self._watch.transport
        if followed is None or transport is None or not self.is_at(index) or type(packed) is not PackedView:
            return None
        if transform_level() is not None or not self.recomputes.prepare(packed):
            return None
        event, index = self.recomputes.expected(followed), self.gate.position
        if event is None or event.kind not in _USES or not is_lifetime(followed, event, packed):
            return None
        if self._has_cuda:
            refuse_capture()
        if not self.recomputes.encode(followed, index):
            return None
        tensor = packer.unpacked(packed)
        self.gate.advance()
        self.act(followed, index)
        return tensor

    def is_at(self, index: int) -> bool:
        return self.gate.is_open and self.gate.position == index

    def act(self, followed: Followed, index: int) -> None:
        """Issues the moves of the plan at this event, which Python has served."""
        event = followed.script.events[index]
        if event.moves:
            self.gate.make_moves(index, False)
        self._make_planned(followed, event)
        if event.moves:
            self.gate.make_moves(index, True)
        self.look_again()

    def _make_planned(self, followed: Followed, event: Event) -> None:
        """Issues the moves that are Python's."""
        deferred, transport = self.packer.deferred, self._watch.transport
        if transport is None:
            return
        if deferred.number:
            deferred.submit_finished(transport)
        if event.moves:
            followed.executor.make_planned(event.moves)

    def look_again(self) -> None:
        """From now on the gate calls at each point, if something waits for the next one."""
        if self.gate.is_open:
            self.gate.attention = self.packer.deferred.number > 0 or self.recomputes.are_waiting

    def _manage_kept(self, followed: Followed) -> None:
        if self._watch.transport is not None:
            manage_kept(self.packer, self.gate, followed, self._watch.transport)

    # At a use that the gate does not serve.

    def use_kept(self, save: _C.KeptSave) -> torch.Tensor:
        """A save that the gate kept is used where the gate did not expect it, or a recompute may read it."""
        packer, watch, transport = self.packer, self._watch, self._watch.transport
        if isinstance(save.tensor, PackedView):
            return packer.unpack(save.tensor)
        if packer.in_forked_child or transport is None:
            return kept_tensor((save.tensor, save.version))
        with packer.lock:
            has_grad_mode = torch.is_grad_enabled()
            try:
                packer.missing.before_use(save)
                if isinstance(save.tensor, PackedView):  # from then on
                    return packer.unpack(save.tensor)
                tensor = kept_tensor((save.tensor, save.version))
                if self._is_used_as_planned(save):
                    return tensor
                with watch.hook(transport):
                    packer.deferred.submit_finished(transport)
                    watch.used_kept(save)
            finally:
                _set_grad_mode(has_grad_mode)
            packer.counters.uses += 1
            packer.counters.used_in_place += 1
        return tensor

    def _is_used_as_planned(self, save: _C.KeptSave) -> bool:
        """Goes on behind the use of a save that the gate kept, if the gate expects that use."""
        followed, index = self._settling.followed, self.gate.position
        event = None if followed is None else self.recomputes.expected(followed)
        if followed is None or event is None or event.kind is not EventKind.USE:
            return False
        if save.step != self.gate.step or save.lifetime != event.lifetime or transform_level() is not None:
            return False
        if not self.recomputes.encode(followed, index):
            return False
        self.gate.advance()
        self.act(followed, index)
        return True


def _has_key(tensor: torch.Tensor, node: torch.autograd.graph.Node | None, key: SaveKey | None) -> bool:
    """True if a save has this key, whose module and dtype were compared."""
    return (
        key is not None
        and ("" if node is None else node.name()) == key.producer
        and tuple(tensor.shape) == key.size
        and tuple(tensor.stride()) == key.stride
    )


for hook in (PlannedHooks._save, PlannedHooks._use, PlannedHooks._moved, PlannedHooks.use_kept):
    keep_dynamo_out(hook)
