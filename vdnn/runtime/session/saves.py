"""The saves of one session, which its hooks share: finds or makes the managed storage of a save, decides what becomes
of it, and returns its tensor at a use.

[Note: One hook at a time] Forward and backward passes run on any threads, and several threads may use one storage. So a
hook that reaches managed storages holds `Saves.lock`. It is a Python lock: destructors never take it, and native code
never waits for it. A forked child may inherit the lock in the locked state, so it does not use the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from vdnn import _C
from vdnn.planning.policies import OnlinePolicy
from vdnn.runtime.recompute.readers import Readers
from vdnn.runtime.session.exemptions import Exemptions
from vdnn.runtime.session.missing import Missing
from vdnn.runtime.session.session_recipes import SessionRecipes
from vdnn.runtime.steps.steps import Steps, StepWatch
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.deferred_copies import DeferredCopies
from vdnn.runtime.storage.facts import StorageFacts, is_dense
from vdnn.runtime.storage.lookahead import Lookahead
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedShard, PackedView
from vdnn.runtime.storage.table import UNSAFE_SPLIT, Table, bytes_to_manage, reach_of, split_of
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.storage.unseen_writes import joins_unseen_writes
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.cuda_graphs import refuse_graphs_around
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import PLAIN_CLASSES
from vdnn.runtime.torch_internals.version_counter import counter_of
from vdnn.step.plan import Action

_KEEP, _OFFLOAD, _RECOMPUTE, _COMPRESS = Action  # an attribute look-up on an Enum class costs as much as a call
_Node = torch.autograd.graph.Node
_Storage = torch.UntypedStorage


class KeptIn(NamedTuple):
    """Facts of a save that the gate kept until now."""

    stream: _C.Stream | None
    module: str | None  # the name of the class of the innermost one
    position: int  # of the Lookahead


class KeepsNatively(Protocol):
    """The saves of a step without a plan that the gate keeps."""

    def python_manages(self, storage: _Storage) -> None:
        """Called before `storage` is managed."""


class Saves:
    """Callers hold the lock. See [Note: One hook at a time].

    If the steps are watched, every save that may move is managed and recorded, whatever its action is. `missing` and
    `recipes` are the hooks' to set: both unpack. `after_save` is called at the end of each managed save.
    """

    missing: Missing

    def __init__(
        self,
        policy: OnlinePolicy,
        counters: Counters,
        modules: ModuleWatch,
        marked: StorageSet,
        transports: Mapping[torch.device, Transport | None],
        steps: Steps,
    ) -> None:
        self.lock = threading.RLock()
        self.counters = counters  # of the session that is entered
        self.transports = transports
        self.steps = steps
        self.watch = steps if isinstance(steps, StepWatch) else None
        self.manages = self.watch is not None or policy.may_offload
        self.readers = Readers()
        self.exemptions = Exemptions(policy, modules, marked, recasts=bool(steps.recomputes))
        self.table: Table[ManagedStorage] = Table()
        self.lookahead = Lookahead()
        self.deferred = DeferredCopies()
        self.recipes: SessionRecipes | None = None
        self.unplanned: KeepsNatively | None = None  # while it keeps saves of the running step
        self.after_save: Callable[[], None] | None = None
        self._modules = modules
        self._forks = forks.count

    # The end, see abandoned.py.

    def is_in_hook(self) -> bool:
        """True if this thread runs a hook that holds the lock."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # threading.Condition calls it, too

    def cut(self) -> None:
        """Cuts the cycles of references between the parts."""
        for transport in self.transports.values():
            if transport is not None:
                transport.has_room = transport.integrity = None
        self.transports = {}
        self.missing.cut()
        if self.recipes is not None:
            self.recipes.cut()
        self.after_save = None

    @property
    def in_forked_child(self) -> bool:
        """True in a forked child (a DataLoader worker): it inherits the hooks, but not the devices and threads."""
        return forks.count != self._forks

    @property
    def managed(self) -> list[ManagedStorage]:
        """The managed storages that graphs still hold."""
        return self.lookahead.living()

    # The managed storage of a save.

    def manage(
        self,
        tensor: torch.Tensor,
        part: torch.Tensor,
        storage: _Storage,
        node: _Node | None,
        transport: Transport,
        kept_in: KeptIn | None = None,
    ) -> tuple[PackedView, bool]:
        """The packed view of `part`, which is the tensor or its shard, and whether its bytes are newly managed.
        `kept_in`: given for a save that the gate has kept until now."""
        counters = self.counters
        if self.unplanned is not None and kept_in is None:
            self.unplanned.python_manages(storage)
        whole, nbytes = storage.nbytes(), part.nbytes
        begin, managed_bytes = (0, whole) if nbytes == whole else bytes_to_manage(part, whole)
        key = (storage._cdata, begin, managed_bytes)
        counted = tensor if tensor._version else part  # see [Note: Shards] in hooks.py
        is_known = managed_bytes < whole or key in self.table.entries
        known = self.table.find(key, whole, counted) if is_known else None
        geometry = (part.dtype, part.size(), part.stride())
        if known is not None and self._can_join(known.found, part, known.begin):
            counters.shared_saves += 1
            return PackedView(known.found, part, known.witness, geometry, known.begin), False
        witness = counter_of(counted)
        if kept_in is None:
            refuse_graphs_around()
            module = self._modules.innermost()
            saved_in = None if module is None else type(module).__name__
            stream, position = transport.current_stream(), None
        else:
            stream, saved_in, position = kept_in.stream or transport.current_stream(), kept_in.module, kept_in.position
        facts = StorageFacts(
            transport.address_of(storage) + begin,
            begin,
            managed_bytes,
            stream,
            geometry,
            nbytes == managed_bytes and is_dense(part),
            saved_in,
            counters,
        )
        managed = ManagedStorage(transport, storage, facts, witness)
        if nbytes != managed_bytes:
            managed.saved_bytes = reach_of(part)
        view = PackedView(managed, part, witness, geometry, begin)
        split = split_of(part, node) if type(node).__name__ == UNSAFE_SPLIT else None
        self.table.add(key, storage, managed, split)
        self.lookahead.note(managed, position)
        return view, True

    def add(self, managed: ManagedStorage, storage: _Storage) -> None:
        """Adds a managed storage that was light until now, and has all bytes of `storage`."""
        self.table.add((storage._cdata, 0, managed.nbytes), storage, managed, None)
        self.lookahead.note(managed)

    def _can_join(self, managed: ManagedStorage, part: torch.Tensor, begin: int) -> bool:
        """False if `managed` cannot restore these bytes: see unseen_writes.py, or it keeps values of another dtype."""
        if managed.saved_bytes is not None and joins_unseen_writes(managed, managed.saved_bytes, part, begin):
            return False
        if managed.facts.geometry[0] is part.dtype:
            return True
        if managed.discarded is not None and not managed.discarded.is_exact_in_bytes:
            return False
        if self.recipes is not None and not managed.has_several_dtypes:
            self.recipes.saved_as_another_dtype(managed)
        return True

    # What becomes of it.

    def save(
        self,
        tensor: torch.Tensor,
        part: torch.Tensor,
        storage: _Storage,
        node: _Node | None,
        transport: Transport,
        known: tuple[PackedView, bool] | None = None,
    ) -> PackedView:
        """Manages a save, in a hook. The plan decides about it; if none has the save, the guard and the policy do.
        `known`: its packed view, if it is managed already, and whether its bytes are newly managed."""
        if self.deferred.number or transport.queue.may_have_released:
            self.deferred.submit_finished(transport)
        packed, is_new = known or self.manage(tensor, part, storage, node, transport)
        managed = packed.managed
        planned = self.steps.saved(managed, tensor, node, is_new=is_new)
        if planned is None:
            self._follow_policy(managed, storage, node, is_new=is_new)
        elif is_new:
            managed.action = planned
            self.deferred.when_complete(managed, node)
            if planned in (_RECOMPUTE, _COMPRESS):
                self._discard(packed, tensor, node)
            elif planned is _KEEP:
                self.counters.keep(Kept.PLAN if self.watch is None else self.watch.kept_for(managed), managed.nbytes)
        if self.recipes is not None and part is tensor:
            self.recipes.saved(packed, tensor, node, is_new=is_new)
        if self.after_save is not None:
            self.after_save()
        return packed

    def follow(
        self, tensor: torch.Tensor, storage: _Storage, node: _Node | None, known: tuple[PackedView, bool]
    ) -> PackedView:
        """Decides about a managed save of a settled step, which differs from its script."""
        transport = known[0].managed.transport
        with self.steps.hook(transport):
            return self.save(tensor, tensor, storage, node, transport, known)

    def _follow_policy(self, managed: ManagedStorage, storage: _Storage, node: _Node | None, *, is_new: bool) -> None:
        """Applies the policy's decision. If it offloads one save of a storage, no later save of it can keep it."""
        if managed.action is _OFFLOAD or managed.discarded is not None:
            return
        reason = self.exemptions.without_plan(storage, node)
        if reason is None and self.watch is not None and self.watch.guards(managed):
            self.deferred.when_complete(managed, node)
            return
        managed.action = _OFFLOAD if reason is None else _KEEP
        if reason is not None:
            self.counters.keep(reason, managed.nbytes)
        if self.watch is not None:
            self.watch.decided(managed, managed.action, reason)
        if is_new or reason is None:
            self.deferred.when_complete(managed, node)

    def offload_soon(self, managed: ManagedStorage) -> None:
        """Issues its copy as soon as the operation that saved it is over."""
        managed.action = _OFFLOAD
        if managed.is_complete:
            managed.complete()
        else:
            self.deferred.when_complete(managed, None)

    def _discard(self, packed: PackedView, tensor: torch.Tensor, node: _Node | None) -> None:
        """Discards a storage that is to be recomputed. If it cannot be recomputed, the policy decides."""
        if not self.discards(packed, tensor, node):
            self.steps.cannot_be_recomputed(packed.managed)
            self._follow_policy(packed.managed, tensor.untyped_storage(), node, is_new=True)

    def discards(self, packed: PackedView, tensor: torch.Tensor, node: _Node | None) -> bool:
        """Discards a storage that is to be recomputed, if it can be."""
        return self.recipes is not None and type(tensor) in PLAIN_CLASSES and self.recipes.discard(packed, tensor, node)

    # At a use.

    def restore(self, managed: ManagedStorage) -> None:
        """Recomputes the bytes before their use, and everything that reads them if the use may overwrite them."""
        if self.readers.are_there:
            self.missing.before_use(managed)
        if managed.discarded is not None:
            self.missing.recompute_for(managed)

    def unpacked(self, packed: PackedView | PackedShard) -> torch.Tensor:
        managed, watch = packed.managed, self.watch
        if self.deferred.number or managed.transport.queue.may_have_released:
            self.deferred.submit_finished(managed.transport)
        needs_mark = watch is not None and managed.source.storage is None  # the use may wait for its bytes
        tensor = watch.unpacked(packed) if needs_mark and watch is not None else packed.unpack()
        if isinstance(packed, PackedView):
            if torch.is_grad_enabled():
                self._add_reload(packed, tensor)
            if self.recipes is not None:
                self.recipes.used(packed, tensor)
        return tensor

    def _add_reload(self, packed: PackedView, tensor: torch.Tensor) -> None:
        """`tensor`, which was unpacked, may be saved again: see [Note: Reloads that are saved] in table.py."""
        managed, storage = packed.managed, tensor.untyped_storage()
        if storage._cdata != managed.native_address:
            self.table.add_reload(storage, managed, packed.begin_in(tensor))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the optimizer writes to its parameters."""
        with self.lock:
            self.missing.before_writes_to(weight for group in optimizer.param_groups for weight in group["params"])
            if self.recipes is not None:
                self.recipes.before_writes()
