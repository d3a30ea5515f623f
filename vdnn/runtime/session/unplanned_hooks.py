"""The hooks of steps without a plan, as far as the native gate keeps their saves.

Nothing of such a step moves until a budget makes it: its guard keeps what fits, and so does a policy that keeps
everything. The gate keeps a plain save as it does in a settled step, and calls here to count it and its uses: the
recorder, the meter and the guard hear of them as of managed storages. A storage is managed as soon as that is needed:
before its guard evicts, before Python manages the same bytes again, and if it outlives its step.
"""

from __future__ import annotations

import weakref

import torch

from vdnn import _C
from vdnn.runtime.recompute import observe_flags_at_save
from vdnn.runtime.session.saves import KeptIn, Saves
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.table import UNSAFE_SPLIT
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out, refuse_graphs_around
from vdnn.runtime.torch_internals.storage_set import free_handle, weak_handle
from vdnn.step.plan import Action

_set_grad_mode = torch._C._set_grad_enabled
_Base = torch._C.TensorBase
_KEEP, *_ = Action
_Storage = torch.UntypedStorage
_ALL = -1
_ALONE = torch.empty(1)  # to count what holds a storage that nobody else holds


class _Waiting:
    """A lifetime that the gate keeps, in DeferredCopies: its operation is not over."""

    __slots__ = ("_native", "_number", "_step", "_waiting", "managed")

    def __init__(self, native: _C.UnplannedSaves, step: WatchedStep, number: int, waiting: dict[int, _Waiting]) -> None:
        self._native = native
        self._step = step
        self._number = number
        self._waiting = waiting
        self.managed: weakref.ref[ManagedStorage] | None = None  # once it was taken over

    def __call__(self) -> _Waiting:
        return self

    def complete(self) -> None:
        """The operation that saved it is over."""
        self._waiting.pop(self._number, None)
        managed = None if self.managed is None else self.managed()
        if managed is not None:
            managed.complete()
        elif self._native.is_alive(self._number):
            self._step.completed_natively(self._number)


class UnplannedHooks:
    """The saves of one session that the gate keeps in steps without a plan."""

    def __init__(self, saves: Saves, watch: StepWatch, min_bytes: int) -> None:
        self._saves = saves
        self._watch = watch
        self._min_bytes = min_bytes
        self._step: WatchedStep | None = None
        self._stream: _C.Stream | None = None
        self._saved_in: dict[int, KeptIn] = {}  # by lifetime
        self._stay: set[int] = set()  # the lifetimes that no guard evicts
        self._waiting: dict[int, _Waiting] = {}
        self._has_taken_over = False  # all that the step has saved
        self.native = _C.UnplannedSaves(
            self._saved,
            self._used,
            torch.Tensor,
            _Base.layout,
            _Base.is_quantized,
            _Base.is_nested,
            _Base._is_zerotensor,
            torch.strided,
            weak_handle,
            free_handle,
            _ALONE,
        )

    # The life of a step.

    def begin(self, step: WatchedStep, transport: Transport) -> bool:
        """From now on the gate keeps the saves of this step. False if they are all Python's."""
        can_keep = step.guard is not None or self._saves.exemptions.keeps_everything
        if not can_keep or transport.fake or len(transport.streams) > 1:
            return False
        recipes = self._saves.recipes
        if recipes is not None and self._watch.looks_for_recomputes and not recipes.has_proofs:
            return False  # each of them is tried, and for that its storage is managed
        self._step, self._stream = step, transport.current_stream()
        self._saves.unplanned = self
        self.native.open(step, transport.torch_device, self._min_bytes)
        if step.recorder is not None:
            step.recorder.native = self.native
        return True

    def end(self) -> None:
        """The step is over. Saves that outlive it stay with the gate, unless they were taken over."""
        self.native.end()
        self._saves.unplanned = self._step = self._stream = None
        self._saved_in, self._stay, self._waiting, self._has_taken_over = {}, set(), {}, False

    def cut(self) -> None:
        """No step will be kept any more."""
        self.end()
        del self.native

    # Called by the gate.

    def _saved(self, save: _C.KeptSave, tensor: torch.Tensor, storage: _Storage, nbytes: int, is_new: bool) -> bool:
        saves = self._saves
        if saves.in_forked_child:
            return False
        try:
            with saves.lock:
                return self._count_save(save, tensor, storage, nbytes, is_new=is_new)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted] in hooks.py
            raise

    def _count_save(
        self, save: _C.KeptSave, tensor: torch.Tensor, storage: _Storage, nbytes: int, *, is_new: bool
    ) -> bool:
        saves, watch, step, transport = self._saves, self._watch, self._step, self._watch.transport
        if step is None or transport is None or watch.is_in_hook:
            return False
        exemptions, recipes, node = saves.exemptions, saves.recipes, tensor.grad_fn
        if recipes is not None:
            observe_flags_at_save(tensor)
        if exemptions.always(tensor, storage, node) is not None or type(node).__name__ == UNSAFE_SPLIT:
            return False
        if transport.current_stream() is not self._stream or len(transport.streams) > 1:
            return False
        reason = exemptions.without_plan(storage, node)
        if step.guard is None:
            if reason is None:
                return False  # the policy offloads it
        elif watch.lacks_room_for_product(tensor):
            return False  # its guard evicts in the middle of this save
        if is_new:
            refuse_graphs_around()
        counters, number = saves.counters, save.lifetime
        with watch if recipes is None else recipes.hook(transport):
            if saves.deferred.number or transport.queue.may_have_released:
                saves.deferred.submit_finished(transport)
            watch.kept_natively(number, storage, tensor, node, is_new=is_new)
            counters.saves += 1
            counters.saved_bytes += tensor.nbytes
            if is_new:
                module = exemptions.modules.innermost()
                saved_in = None if module is None else type(module).__name__
                self._saved_in[number] = KeptIn(self._stream, saved_in, saves.lookahead.take_position())
            else:
                counters.shared_saves += 1
            if reason is not None:
                counters.keep(reason, nbytes)
                if is_new:
                    self._stay.add(number)
            elif step.guard is not None:
                self._stay.discard(number)
                if is_new:
                    counters.keep(Kept.FITS, nbytes)
                step.guard.count_small(counters)
            if is_new or reason is None:
                self._when_complete(number, node, step)
            if recipes is not None and not recipes.kept_natively(save, tensor, node, is_new=is_new):
                self._take_over(number, step)
                if isinstance(save.tensor, PackedView):
                    recipes.search(save.tensor, tensor, node)
        return True

    def _when_complete(self, number: int, node: torch.autograd.graph.Node | None, step: WatchedStep) -> None:
        """Does what DeferredCopies.when_complete does."""
        if node is not None:
            step.completed_natively(number)
        elif number not in self._waiting:
            waiting = self._waiting[number] = _Waiting(self.native, step, number, self._waiting)
            self._saves.deferred.add(waiting)  # type: ignore[arg-type]  # it stands for a reference to itself

    def _used(self, save: _C.KeptSave) -> None:
        saves, watch, transport = self._saves, self._watch, self._watch.transport
        if saves.in_forked_child or transport is None:
            return
        with saves.lock:
            has_grad_mode = torch.is_grad_enabled()
            try:
                with (saves.recipes or watch).hook(transport):
                    if saves.deferred.number or transport.queue.may_have_released:
                        saves.deferred.submit_finished(transport)
                    watch.used_kept(save)
            finally:
                _set_grad_mode(has_grad_mode)
            saves.counters.uses += 1
            saves.counters.used_in_place += 1

    # Taking over.

    def python_manages(self, storage: _Storage) -> None:
        """Called before a storage is managed: the step may have kept saves of it."""
        step, number = self._step, self.native.lifetime_at(storage._cdata)
        if step is None or number is None:
            return
        self._take_over(number, step)
        if step.recorder is not None and self.native.lifetime_at(storage._cdata) is not None:
            step.recorder.shares(number, storage)

    def take_over_all(self) -> None:
        """From now on Python manages all that the step saves, and all that it has saved and is alive."""
        step = self._step
        if step is not None and not self._has_taken_over:
            self.native.close()
            self._has_taken_over = True
            self._take_over(_ALL, step)

    def _take_over(self, number: int, step: WatchedStep) -> None:
        """Manages the saves of a lifetime, or all of them."""
        saves, transport, kept = self._saves, self._watch.transport, self.native.hand_over(number)
        if transport is None or not kept:
            return
        for save in kept:
            tensor, one = save.tensor, save.lifetime
            packed, is_new = saves.manage(
                tensor,
                tensor,
                tensor.untyped_storage(),
                None,
                transport,
                kept_in=self._saved_in[one],
            )
            if is_new:
                managed = packed.managed
                managed.action = _KEEP
                waiting = self._waiting.get(one)
                if waiting is None:
                    managed.is_complete = True
                else:
                    waiting.managed = managed.reference
                step.take_over(managed, one, is_evictable=one not in self._stay)
            else:
                saves.counters.shared_saves -= 1  # it was counted
            save.replace(packed)
        saves.readers.forget_index()


for hook in (UnplannedHooks._saved, UnplannedHooks._used):
    keep_dynamo_out(hook)
