"""The pack and unpack hooks: pack receives a tensor that autograd saves, unpack returns it at a use.

[Note: Shards] A DTensor wraps its local part, a plain tensor. That part may move like any other tensor, and a use wraps
it again. An in-place write through a DTensor counts on the wrapper's version only, so a use also compares that version.
Wrappers that nobody wrote through share the managed storage of their part and its version counter (a layer's input is
wrapped anew for each of q, k and v). No recipe is searched for a shard.

[Note: One hook at a time] Forward and backward passes run on any threads, and several threads may use one storage. So a
hook that reaches managed storages holds the packer's lock. It is a Python lock: destructors never take it, and native
code never waits for it. A forked child may inherit the lock in the locked state, so it does not use the lock.

[Note: Interrupted] Ctrl-C may interrupt a hook between any two bytecodes, including those of `with torch.no_grad()`. So
a hook restores the grad mode itself, by a native call in a `finally`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn._C import KeptSave, LightSave
from vdnn.errors import VdnnError
from vdnn.planning.policies import OnlinePolicy
from vdnn.runtime.recompute import observe_flags_at_save
from vdnn.runtime.recompute.readers import Readers, may_be_overwritten
from vdnn.runtime.recompute.rechecks import Rechecks
from vdnn.runtime.recompute.tolerance import Tolerance
from vdnn.runtime.session.exemptions import Exemptions
from vdnn.runtime.session.light_storages import full_view
from vdnn.runtime.session.missing import Missing
from vdnn.runtime.session.planned_hooks import PlannedHooks
from vdnn.runtime.session.saved_storages import SavedStorages
from vdnn.runtime.session.session_recipes import SessionRecipes
from vdnn.runtime.steps.unwatched import Steps
from vdnn.runtime.steps.watch import StepWatch
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.deferred_copies import DeferredCopies
from vdnn.runtime.storage.kept import KeptTensor, keep_tensor, kept_tensor, unpack_without_hooks
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedShard, PackedView
from vdnn.runtime.storage.table import Table
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out, refuse_capture
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import (
    CLASSES_WITH_DATA,
    PLAIN_CLASSES,
    is_traced,
    num_dispatch_modes,
    outside_of_transforms,
    plain_part,
    transform_level,
)
from vdnn.runtime.training_state.parameters.packed_parameter import ParameterSaves, hooks_of
from vdnn.step.plan import Action

Packed = KeptTensor | KeptSave | LightSave | PackedView | PackedShard
_STRIDED = torch.strided
_KEEP, _OFFLOAD, _RECOMPUTE, _COMPRESS = Action  # an attribute look-up on an Enum class costs as much as a call
_set_grad_mode = torch._C._set_grad_enabled
_Node = torch.autograd.graph.Node
_Storage = torch.UntypedStorage


class Packer:
    """The hooks of one session. Its methods run inside autograd, on any thread.

    If the steps are watched, every save that may move is managed and recorded, whatever its action is. Otherwise a save
    that the policy keeps is not managed.
    """

    def __init__(
        self,
        policy: OnlinePolicy,
        min_bytes: int,
        counters: Counters,
        modules: ModuleWatch,
        marked: StorageSet,
        transports: Mapping[torch.device, Transport | None],
        steps: Steps,
        tolerance: Tolerance,
        rechecks: Rechecks,
        parameters: ParameterSaves | None = None,
    ) -> None:
        self._min_bytes = max(min_bytes, 1)  # an empty tensor has nothing to move
        self.counters = counters  # of the session that is entered
        self._modules = modules
        self._transports = transports
        self._steps = steps
        self._watch = steps if isinstance(steps, StepWatch) else None
        self._manages = self._watch is not None or policy.may_offload
        readers = self.readers = Readers()
        self.exemptions = Exemptions(policy, modules, marked, recasts=bool(steps.recomputes))
        self.table: Table[ManagedStorage] = Table()
        self.lock = threading.RLock()  # see [Note: One hook at a time]
        planned = self._planned = None if self._watch is None else PlannedHooks(self, self._watch, readers)
        self.pack_hook, self.unpack_hook = hooks_of(self if planned is None else planned.gate, parameters)
        unpack = self.unpack_hook
        self.recipes = (
            SessionRecipes(unpack, steps, tolerance, rechecks, readers, modules.running) if steps.recomputes else None
        )
        self.missing = Missing(self.unpack if planned is None else planned.recomputes.unpack_operand, steps, readers)
        self.storages = SavedStorages(modules, self.recipes, self.table)
        self.lookahead = self.storages.lookahead
        self.deferred = DeferredCopies()
        self._parameters = parameters
        self._forks, self._has_cuda = forks.count, torch.cuda.is_available()

    def watch_modules(self) -> Iterator[Callable[[], None]]:
        """Notes at module calls what recipes need. Yields what ends that, for the session that installs this."""
        if self.recipes is not None:
            yield from self.recipes.watch_modules(None if self._planned is None else self._planned.gate)

    # The end, see abandoned.py.

    def is_in_hook(self) -> bool:
        """True if this thread runs a hook of these."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # threading.Condition calls it, too

    def leave_settled_step(self) -> None:
        """From now on Python serves the running step."""
        if self._watch is not None:
            self._watch.settling.leave()

    def cut(self) -> None:
        """Cuts the cycles of references between the parts. Graphs may still use what was kept, and nothing else."""
        for transport in self._transports.values():
            if transport is not None:
                transport.has_room = transport.integrity = None
        self._transports = {}
        del self.pack_hook, self.unpack_hook
        if self._parameters is not None:
            self._parameters.cut()
        self.missing.cut()
        if self.recipes is not None:
            self.recipes.cut()
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.cut()

    @property
    def in_forked_child(self) -> bool:
        """True in a forked child (a DataLoader worker): it inherits the hooks, but not the devices and threads."""
        return forks.count != self._forks

    @property
    def managed(self) -> list[ManagedStorage]:
        """The managed storages that graphs still hold."""
        return self.lookahead.living()

    # Saving.

    def pack(self, tensor: torch.Tensor) -> Packed:
        counters = self.counters
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
        if self.recipes is not None:
            observe_flags_at_save()
        node = tensor.grad_fn  # read once: each read makes a Python object
        reason = self.exemptions.always(tensor, storage, node)
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
            with self.lock:
                packed = self._pack_movable(tensor, part, storage, node, nbytes)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted]; else autograd would save nothing
            raise
        return packed if part is tensor or isinstance(packed, tuple) else PackedShard(packed, tensor)

    def _make_room_for_product(self, weight: torch.Tensor, watch: StepWatch) -> None:
        """`weight` stays. The operation that saves it may make much more of it."""
        if forks.count != self._forks or transform_level() is not None:
            return
        nbytes = watch.passed_weight(weight)
        if not nbytes:
            return
        try:
            with self.lock:
                watch.make_room_for_product(nbytes)
        except BaseException:
            _set_grad_mode(True)  # see [Note: Interrupted]
            raise

    def _pass_through(self, tensor: torch.Tensor, nbytes: int) -> KeptTensor:
        """Keeps a tensor that is no plain memory. An unknown subclass may hold any other tensors: 0 bytes."""
        watch = self._watch
        if watch is not None and watch.notes_what_passes_through and not self.in_forked_child and not is_traced():
            with self.lock:
                transport = self._transports[tensor.device]
                if transport is not None:
                    watch.passes_through(transport)
        return self._keep(tensor, Kept.SUBCLASS, nbytes)

    def _pack_movable(
        self, tensor: torch.Tensor, part: torch.Tensor, storage: _Storage, node: _Node | None, nbytes: int
    ) -> KeptTensor | PackedView:
        transport = self._transports[part.device]
        if transport is None:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        if transport.fake is not (type(part) is FakeTensor):
            if transport.fake:
                raise VdnnError(
                    "a tensor with data was saved, and the VirtualMachine of this session has none. Make the model and "
                    "its inputs inside `with machine:`, or make the machine with fake=False."
                )
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        if not self._manages:
            return self._keep(tensor, Kept.POLICY, nbytes)
        if self._has_cuda:
            refuse_capture()
        watch = self._watch
        if watch is None:
            return self._save(tensor, part, storage, node, transport)
        watch.before_save()
        with (self.recipes or watch).hook(transport):
            return self._save(tensor, part, storage, node, transport)

    def _save(
        self,
        tensor: torch.Tensor,
        part: torch.Tensor,
        storage: _Storage,
        node: _Node | None,
        transport: Transport,
        known: tuple[PackedView, bool] | None = None,
    ) -> PackedView:
        """`known`: the packed view, if it is made already, and whether its bytes are newly managed."""
        self.deferred.submit_finished(transport)
        packed, is_new = known or self.storages.manage(tensor, part, storage, node, transport, self.counters)
        steps, managed = self._steps, packed.managed
        planned = steps.saved(managed, tensor, is_new=is_new)
        if planned is None:
            self._follow_policy(managed, storage, node, is_new=is_new)
        elif is_new:
            managed.action = planned
            self.deferred.when_complete(managed, node)
            if planned in (_RECOMPUTE, _COMPRESS):
                self._discard(packed, tensor, node)
            elif planned is _KEEP:
                self.counters.keep(Kept.PLAN, managed.nbytes)
        if self.recipes is not None and part is tensor:
            self.recipes.saved(packed, tensor, node, is_new=is_new)
        if self._planned is not None:
            self._planned.look_again()
        return packed

    def manage(
        self, tensor: torch.Tensor, storage: _Storage, node: _Node | None, transport: Transport
    ) -> tuple[PackedView, bool]:
        """The packed view of a save of a settled step, and if its bytes are newly managed."""
        return self.storages.manage(tensor, tensor, storage, node, transport, self.counters)

    def follow(
        self,
        tensor: torch.Tensor,
        storage: _Storage,
        node: _Node | None,
        transport: Transport,
        known: tuple[PackedView, bool],
    ) -> PackedView:
        """Decides about a managed save of a settled step, which differs from its script."""
        with self._steps.hook(transport):
            return self._save(tensor, tensor, storage, node, transport, known)

    def _keep(self, tensor: torch.Tensor, reason: Kept, nbytes: int) -> KeptTensor:
        counters = self.counters
        counters.kept[reason] += 1
        counters.kept_bytes[reason] += nbytes
        return keep_tensor(tensor)

    def _follow_policy(self, managed: ManagedStorage, storage: _Storage, node: _Node | None, *, is_new: bool) -> None:
        """Applies the policy's decision. If it offloads one save of a storage, no later save of it can keep it."""
        if managed.action is _OFFLOAD:
            return
        reason = self.exemptions.without_plan(storage, node)
        if reason is None and self._watch is not None and self._watch.guards(managed):
            self.deferred.when_complete(managed, node)
            return
        managed.action = _OFFLOAD if reason is None else _KEEP
        if reason is not None:
            self.counters.keep(reason, managed.nbytes)
        if is_new or reason is None:
            self.deferred.when_complete(managed, node)

    def offload_soon(self, managed: ManagedStorage) -> None:
        """Issues its copy as soon as the running operation is over."""
        managed.action = _OFFLOAD
        self.deferred.when_complete(managed, None)

    def _discard(self, packed: PackedView, tensor: torch.Tensor, node: _Node | None) -> None:
        """Discards a storage that is to be recomputed. If it cannot be recomputed, the policy decides."""
        if not self.discards(packed, tensor, node):
            self._steps.cannot_be_recomputed(packed.managed)
            self._follow_policy(packed.managed, tensor.untyped_storage(), node, is_new=True)

    def discards(self, packed: PackedView, tensor: torch.Tensor, node: _Node | None) -> bool:
        """Discards a storage that is to be recomputed, if it can be."""
        return self.recipes is not None and type(tensor) in PLAIN_CLASSES and self.recipes.discard(packed, tensor, node)

    # Using.

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, tuple):
            readers = self.readers  # as `are_there`, without a call: most saves are of this kind
            are_there = readers.discarded or (readers.mover is not None and readers.mover.has_discarded)
            if are_there and forks.count == self._forks:
                with self.lock:
                    self.missing.before_use(packed[0])
            return kept_tensor(packed)
        if type(packed) is KeptSave:
            return unpack_without_hooks(packed) if self._planned is None else self._planned.use_kept(packed)
        if type(packed) is LightSave:
            packed = full_view(packed)
        if forks.count != self._forks:
            return packed.unpack()
        if transform_level() is not None:
            with self.lock, outside_of_transforms():
                return self._use(packed)
        with self.lock:
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
        overwritten = may_be_overwritten()
        if overwritten and packed.managed.container is not None:
            (packed if isinstance(packed, PackedView) else packed.view).move_to_container()
        managed = packed.managed
        if overwritten:
            managed.keep_reloaded()  # its uses must return the same memory: each sees writes through the others
        if managed.discarded is not None or self.readers.are_there:
            self.restore(managed)
        watch = self._watch
        if watch is None:
            tensor = self.unpacked(packed)
            self.lookahead.used(managed)
            return tensor
        with (self.recipes or watch).hook(managed.transport):
            tensor = self.unpacked(packed)
            if not watch.used(managed):
                self.lookahead.used(managed)
        return tensor

    def restore(self, managed: ManagedStorage) -> None:
        """Recomputes what a use of these bytes needs: themselves, and what reads them if they may be overwritten."""
        if self.readers.are_there:
            self.missing.before_use(managed)
        if managed.discarded is not None:
            self.missing.recompute_for(managed)

    def unpacked(self, packed: PackedView | PackedShard) -> torch.Tensor:
        self.deferred.submit_finished(packed.managed.transport)
        watch = self._watch
        tensor = packed.unpack() if watch is None else watch.unpacked(packed)
        if isinstance(packed, PackedView):
            if torch.is_grad_enabled():
                self.storages.add_reload(packed, tensor)
            if self.recipes is not None:
                self.recipes.used(packed, tensor)
        return tensor

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the optimizer writes to its parameters."""
        with self.lock:
            self.missing.before_writes_to(weight for group in optimizer.param_groups for weight in group["params"])


keep_dynamo_out(Packer.pack)
keep_dynamo_out(Packer.unpack)
