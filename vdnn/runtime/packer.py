"""The two hooks: what autograd hands over at a save, and what it gets back at a use.

[Note: Copies wait for their operation] An operation may pack a tensor that its kernel fills only afterwards (rrelu
does so with its noise). Only a tensor with a history is sure to be complete when it is packed: its copy is issued at
once. That of any other is issued when the operation is over: at the first hook that finds autograd's sequence number
moved on, on the same thread. Until then the storage simply is still on the device.

[Note: One hook at a time] Forwards and backwards run on any threads, and one storage may be used by several of them.
So a hook that reaches managed storages holds the packer's lock. It is a lock of Python: destructors never take it, and
native code never waits for it. A forked child may have inherited it taken, and does not use it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vdnn.planning.policies import OnlinePolicy, SaveFacts
from vdnn.runtime import process_forks
from vdnn.runtime.capture import keep_dynamo_out, refuse_capture
from vdnn.runtime.counters import Counters, Kept
from vdnn.runtime.dropped import missing_for
from vdnn.runtime.kept import KeptTensor, keep_tensor, kept_tensor
from vdnn.runtime.lookahead import Lookahead
from vdnn.runtime.module_watch import ModuleWatch, is_conv
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.rebuilds import Rebuilds
from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.step_watch import StepWatch
from vdnn.runtime.storage_table import ManagedTable, StorageSet, bytes_to_manage, split_of
from vdnn.runtime.tensor_kinds import PLAIN_CLASSES, is_cast_of_a_leaf, is_fake, is_view_of_a_cast
from vdnn.runtime.tolerance import Tolerance
from vdnn.runtime.transport import Transport
from vdnn.runtime.version_check import counter_of
from vdnn.step_plan import Action

Packed = KeptTensor | PackedView
_STRIDED = torch.strided
_Node = torch.autograd.graph.Node
_Storage = torch.UntypedStorage
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Here:
    """What the packer knows of one thread."""

    __slots__ = ("deferred", "paused", "sequence_nr")

    def __init__(self) -> None:
        self.deferred: list[tuple[weakref.ref[ManagedStorage], bool]] = []  # and whether each is to be copied
        self.sequence_nr = 0  # autograd's, when the last of them was saved
        self.paused = 0


class Packer:
    """Packs and unpacks for one session. Its methods run inside autograd, on any thread.

    With `steps`, every save that may move is managed and told of, whatever becomes of it; without, what the policy
    keeps costs next to nothing.
    """

    def __init__(
        self,
        policy: OnlinePolicy,
        min_bytes: int,
        counters: Counters,
        modules: ModuleWatch,
        marked: StorageSet,
        transports: Mapping[torch.device, Transport | None],
        steps: StepWatch | None,
        tolerance: Tolerance,
    ) -> None:
        self._policy = policy
        self._offloads_everything = policy.offloads_everything
        self._min_bytes = max(min_bytes, 1)  # an empty tensor has nothing to move
        self._counters = counters
        self._modules = modules
        self._parameters = modules.parameters
        self._marked = marked
        self._transports = transports
        self._steps = steps
        may_rebuild = policy.rebuilds if steps is None else steps.ways.rebuilds
        self._rebuilds = Rebuilds(self.unpack, steps, tolerance) if may_rebuild else None
        self._table = ManagedTable()
        self.lookahead = Lookahead()
        self._local = threading.local()
        self._was_paused = False  # on any thread, ever: as a rule there is nothing to ask the thread
        self.lock = threading.RLock()  # see [Note: One hook at a time]
        self._forks = process_forks.count
        self._has_cuda = torch.cuda.is_available()

    def watch_modules(self) -> Iterator[Any]:
        """Hooks of torch that recipes need: for whoever installs the session's."""
        if self._rebuilds is not None:
            yield torch.nn.modules.module.register_module_forward_pre_hook(self._rebuilds.before_module)
            yield torch.nn.modules.module.register_module_forward_hook(self._rebuilds.behind_module)

    @property
    def in_forked_child(self) -> bool:
        """Of the process that made this: hooks are inherited (by DataLoader workers), devices and threads are not."""
        return process_forks.count != self._forks

    @property
    def managed(self) -> list[ManagedStorage]:
        """What graphs still hold."""
        return self.lookahead.living()

    def _here(self) -> _Here:
        here: _Here | None = getattr(self._local, "here", None)
        if here is None:
            here = self._local.here = _Here()
        return here

    # Saving.

    def pack(self, tensor: torch.Tensor) -> Packed:
        counters = self._counters
        counters.saves += 1
        # What is small is the most frequent: for that nothing is asked but what has to be.
        if type(tensor) not in PLAIN_CLASSES or tensor.layout is not _STRIDED:
            return self._keep(tensor, Kept.SUBCLASS, 0)
        nbytes = tensor.nbytes
        counters.saved_bytes += nbytes
        storage = tensor.untyped_storage()
        # By what is held, not by what is seen: a small view may be the last holder of a large storage.
        if storage.nbytes() < self._min_bytes or not nbytes:
            return self._keep(tensor, Kept.SMALL, nbytes)
        if tensor.is_quantized:
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        node = tensor.grad_fn  # asked for once: it is made at every question
        reason = self._exemption(tensor, storage, node)
        if reason is not None:
            return self._keep(tensor, reason, nbytes)
        if process_forks.count != self._forks:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        with self.lock:
            return self._take(tensor, storage, node, nbytes)

    def _take(self, tensor: torch.Tensor, storage: _Storage, node: _Node | None, nbytes: int) -> Packed:
        transport = self._transports[tensor.device]
        if transport is None:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        if transport.fake is not is_fake(tensor):
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        if self._steps is not None:
            return self._take_watched(tensor, storage, node, nbytes, transport, self._steps)
        if not self._policy.may_offload:
            return self._keep(tensor, Kept.POLICY, nbytes)
        if self._has_cuda:
            refuse_capture()
        self.submit_finished(transport)
        packed, is_new = self._manage(tensor, storage, node, nbytes, transport)
        if self._rebuilds is not None:
            self._rebuilds.saved(packed, tensor, node, is_new=is_new)
            if is_new and self._rebuilds.drop(packed, tensor, node):
                return packed
        self._follow_policy(packed.managed, storage, node, is_new=is_new)
        return packed

    def _keep(self, tensor: torch.Tensor, reason: Kept, nbytes: int) -> KeptTensor:
        counters = self._counters
        counters.kept[reason] += 1
        counters.kept_bytes[reason] += nbytes
        return keep_tensor(tensor)

    def _exemption(self, tensor: torch.Tensor, storage: _Storage, node: _Node | None) -> Kept | None:
        """Why it stays whatever a policy or a plan says."""
        if self._was_paused and self._here().paused:
            return Kept.PAUSED
        address = storage._cdata
        if address in self._parameters.addresses and storage in self._parameters:
            return Kept.PARAMETER
        # A leaf may also be a view of a tensor without grad, and a view of a leaf is none: both need asking.
        if node is None and tensor.requires_grad:
            return Kept.PARAMETER
        base = tensor._base
        if base is not None:
            node = base.grad_fn
            if node is None and base.requires_grad:
                return Kept.PARAMETER
        if self._rebuilds is None and node is not None and is_cast_of_a_leaf(node):
            return Kept.PARAMETER_CAST  # else it may be cast again: see _why_it_stays
        if (address in self._marked.addresses and storage in self._marked) or self._modules.in_marked():
            return Kept.MARKED
        return None

    def _why_it_stays(self, storage: _Storage, node: _Node | None) -> Kept | None:
        """Without a plan."""
        if self._rebuilds is not None and node is not None and is_view_of_a_cast(node):
            return Kept.PARAMETER_CAST
        if self._offloads_everything:
            return None
        module = self._modules.innermost()
        kind = "" if module is None else type(module).__name__
        return None if self._policy.offloads(SaveFacts(storage.nbytes(), kind, is_conv(module))) else Kept.POLICY

    def _manage(
        self,
        tensor: torch.Tensor,
        storage: _Storage,
        node: _Node | None,
        nbytes: int,
        transport: Transport,
    ) -> tuple[PackedView, bool]:
        """What stands for the tensor, and whether its managed storage is new."""
        whole = storage.nbytes()
        begin, managed_bytes = (0, whole) if nbytes == whole else bytes_to_manage(tensor, whole)
        key = (storage._cdata, begin, managed_bytes)
        known = self._table.find(key, tensor)
        if known is not None:
            self._counters.shared_saves += 1
            return PackedView(known[0], tensor, known[1]), False
        witness = counter_of(tensor)
        managed = ManagedStorage(transport, self._counters, storage, begin, managed_bytes, witness)
        view = PackedView(managed, tensor, witness)
        managed.geometry = view.geometry
        managed.is_dense = nbytes == managed_bytes and view.is_dense(tensor)
        managed.split = split_of(tensor, node)
        module = self._modules.innermost()
        if module is not None:
            managed.saved_in = type(module)
        self._table.add(key, storage, managed)
        self.lookahead.note(managed)
        return view, True

    def _follow_policy(self, managed: ManagedStorage, storage: _Storage, node: _Node | None, *, is_new: bool) -> None:
        """What one save of a storage offloads no other can keep: it is one storage, however often it is saved."""
        if managed.is_to_leave:
            return
        reason = self._why_it_stays(storage, node)
        managed.is_to_leave = reason is None
        if is_new or reason is None:
            self._when_complete(managed, node, offloads=reason is None)
        if reason is not None:
            self._counters.keep(reason, managed.nbytes)

    def _take_watched(
        self,
        tensor: torch.Tensor,
        storage: _Storage,
        node: _Node | None,
        nbytes: int,
        transport: Transport,
        steps: StepWatch,
    ) -> PackedView:
        if self._has_cuda:
            refuse_capture()
        if steps.step_ends_before_this_save():
            steps.end_step()
        with (self._rebuilds or steps).hook(transport):
            self.submit_finished(transport)
            is_aliased = self._table.holds(storage._cdata)
            packed, is_new = self._manage(tensor, storage, node, nbytes, transport)
            managed = packed.managed
            planned = steps.saved(managed, tensor, is_new=is_new, is_aliased=is_new and is_aliased)
            if planned is None:
                self._follow_policy(managed, storage, node, is_new=is_new)
            elif is_new:
                offloads = managed.is_to_leave = planned is Action.OFFLOAD
                self._when_complete(managed, node, offloads=offloads)
                if planned in (Action.RECOMPUTE, Action.COMPRESS):
                    self._drop(packed, tensor, node)
                elif not offloads:
                    self._counters.keep(Kept.PLAN, managed.nbytes)
            if self._rebuilds is not None:
                self._rebuilds.saved(packed, tensor, node, is_new=is_new)
        return packed

    def _drop(self, packed: PackedView, tensor: torch.Tensor, node: _Node | None) -> None:
        """What the plan rebuilds; if it cannot be, the policy decides."""
        if self._rebuilds is None or not self._rebuilds.drop(packed, tensor, node):
            assert self._steps is not None, "whose plan it is"
            self._steps.cannot_be_rebuilt(packed.managed)
            self._follow_policy(packed.managed, tensor.untyped_storage(), node, is_new=True)

    # Copies wait for their operation.

    def _when_complete(self, managed: ManagedStorage, node: _Node | None, *, offloads: bool) -> None:
        """See [Note: Copies wait for their operation]. `node` is the grad_fn of what was saved."""
        if node is not None:
            managed.complete(offloads=offloads)
            return
        here = self._here()
        here.deferred.append((managed.reference, offloads))
        here.sequence_nr = _sequence_nr()

    def submit_finished(self, transport: Transport) -> None:
        """Issues the copies whose operation is over. See [Note: Copies wait for their operation]."""
        here = self._here()
        if here.deferred and here.sequence_nr != _sequence_nr():
            deferred, here.deferred = here.deferred, []
            for reference, offloads in deferred:
                managed = reference()
                if managed is not None:  # else its graph is gone
                    managed.complete(offloads=offloads)
        transport.drop_released()

    # Using.

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, tuple):
            return kept_tensor(packed)
        if process_forks.count != self._forks:
            return packed.unpack()
        with self.lock:
            return self._use(packed)

    def _use(self, packed: PackedView) -> torch.Tensor:
        managed = packed.managed
        steps = self._steps
        if self._has_cuda:
            refuse_capture()
        if managed.dropped is not None:
            for missing in missing_for(managed):
                self._rebuild(missing)
        if steps is None:
            self.submit_finished(managed.transport)
            tensor = packed.unpack()
            self.lookahead.used(managed)
            return tensor
        with (self._rebuilds or steps).hook(managed.transport):
            self.submit_finished(managed.transport)
            with steps.reloading(managed.transport):
                tensor = packed.unpack()
            if not steps.used(managed):
                self.lookahead.used(managed)
        return tensor

    def _rebuild(self, managed: ManagedStorage) -> None:
        """What it reads is used like anything else: at hooks of their own, before this use's."""
        assert managed.dropped is not None, "it is missing"
        steps = self._steps
        with contextlib.nullcontext() if steps is None else steps.rebuilding(managed.transport):
            managed.dropped.rebuild(managed, self.unpack)

    # Pausing.

    def pause(self, paused: bool) -> None:
        self._was_paused = True
        self._here().paused += 1 if paused else -1


keep_dynamo_out(Packer.pack)
keep_dynamo_out(Packer.unpack)
