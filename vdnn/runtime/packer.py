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

import threading
import weakref
from collections.abc import Callable

import torch

from vdnn.planning.policies import OnlinePolicy, SaveFacts
from vdnn.runtime import process_forks
from vdnn.runtime.counters import Counters, Kept
from vdnn.runtime.kept import KeptTensor
from vdnn.runtime.lookahead import Lookahead
from vdnn.runtime.module_watch import ModuleWatch, is_conv
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.step_watch import StepWatch
from vdnn.runtime.storage_table import ManagedTable, StorageSet, split_of
from vdnn.runtime.tensor_kinds import PLAIN_CLASSES, is_fake
from vdnn.runtime.transport import Transport
from vdnn.runtime.version_check import counter_of

Packed = KeptTensor | PackedView
_STRIDED = torch.strided
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


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
        transport_for: Callable[[torch.device], Transport | None],
        steps: StepWatch | None = None,
    ) -> None:
        self._policy = policy
        self._min_bytes = max(min_bytes, 1)  # an empty tensor has nothing to move
        self._counters = counters
        self._modules = modules
        self._marked = marked
        self._transport_for = transport_for
        self._steps = steps
        self._table = ManagedTable()
        self.lookahead = Lookahead()
        self._local = threading.local()
        self.lock = threading.RLock()  # see [Note: One hook at a time]
        self._forks = process_forks.count()

    @property
    def in_forked_child(self) -> bool:
        """Of the process that made this: hooks are inherited (by DataLoader workers), devices and threads are not."""
        return process_forks.count() != self._forks

    @property
    def managed(self) -> list[ManagedStorage]:
        """What graphs still hold."""
        return self.lookahead.living()

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
        reason = self._exemption(tensor, storage)
        if reason is not None:
            return self._keep(tensor, reason, nbytes)
        if self.in_forked_child:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        with self.lock:
            return self._take(tensor, storage, nbytes)

    def _take(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int) -> Packed:
        transport = self._transport_for(tensor.device)
        if transport is None:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        if transport.fake is not is_fake(tensor):
            return self._keep(tensor, Kept.SUBCLASS, nbytes)
        if self._steps is not None:
            return self._take_watched(tensor, storage, transport, self._steps)
        if not self._policy.may_offload:
            return self._keep(tensor, Kept.POLICY, nbytes)
        self.submit_finished(transport)
        packed, is_new = self._manage(tensor, storage, transport)
        self._follow_policy(packed.managed, tensor, storage, is_new=is_new)
        return packed

    def _keep(self, tensor: torch.Tensor, reason: Kept, nbytes: int) -> KeptTensor:
        counters = self._counters
        counters.kept[reason] += 1
        counters.kept_bytes[reason] += nbytes
        return KeptTensor(tensor)

    def _exemption(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Kept | None:
        """Why it stays whatever a policy or a plan says."""
        if getattr(self._local, "paused", 0):
            return Kept.PAUSED
        base = tensor if tensor._base is None else tensor._base
        if storage in self._modules.parameters or _is_grad_leaf(base) or _is_grad_leaf(tensor):
            return Kept.PARAMETER
        if _is_cast_of_parameter(base):
            return Kept.PARAMETER_CAST
        if storage in self._marked or self._modules.in_marked():
            return Kept.MARKED
        return None

    def _policy_offloads(self, storage: torch.UntypedStorage) -> bool:
        if self._policy.offloads_everything:
            return True
        module = self._modules.innermost()
        kind = "" if module is None else type(module).__name__
        return self._policy.offloads(SaveFacts(storage.nbytes(), kind, is_conv(module)))

    def _manage(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, transport: Transport
    ) -> tuple[PackedView, bool]:
        """What stands for the tensor, and whether its managed storage is new."""
        begin, nbytes = _bytes_to_manage(tensor, storage)
        known = self._table.find(storage, begin, nbytes, tensor)
        if known is not None:
            self._counters.shared_saves += 1
            return PackedView(known[0], tensor, known[1]), False
        managed = ManagedStorage(transport, self._counters, storage, begin, nbytes, counter_of(tensor))
        managed.split = split_of(tensor)
        module = self._modules.innermost()
        managed.label = (tensor.dtype, tensor.shape, "no module" if module is None else type(module).__name__)
        self._table.add(storage, managed)
        self.lookahead.note(managed)
        return PackedView(managed, tensor, managed.witness), True

    def _follow_policy(
        self, managed: ManagedStorage, tensor: torch.Tensor, storage: torch.UntypedStorage, *, is_new: bool
    ) -> None:
        """What one save of a storage offloads no other can keep: it is one storage, however often it is saved."""
        if managed.is_to_leave:
            return
        managed.is_to_leave = self._policy_offloads(storage)
        if is_new or managed.is_to_leave:
            self._when_complete(managed, tensor, offloads=managed.is_to_leave)
        if not managed.is_to_leave:
            self._counters.keep(Kept.POLICY, managed.nbytes)

    def _take_watched(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, transport: Transport, steps: StepWatch
    ) -> PackedView:
        if steps.step_ends_before_this_save():
            steps.end_step()
        with steps.hook(transport):
            self.submit_finished(transport)
            is_aliased = self._table.holds(storage)
            packed, is_new = self._manage(tensor, storage, transport)
            managed = packed.managed
            planned = steps.saved(managed, tensor, is_new=is_new, is_aliased=is_new and is_aliased)
            if planned is None:
                self._follow_policy(managed, tensor, storage, is_new=is_new)
            elif is_new:
                managed.is_to_leave = planned
                self._when_complete(managed, tensor, offloads=planned)
                if not planned:
                    self._counters.keep(Kept.PLAN, managed.nbytes)
        return packed

    # Copies wait for their operation.

    def _when_complete(self, managed: ManagedStorage, tensor: torch.Tensor, *, offloads: bool) -> None:
        """See [Note: Copies wait for their operation]."""
        if tensor.grad_fn is not None:
            managed.complete(offloads=offloads)
            return
        self._deferred().append((weakref.ref(managed), offloads))
        self._local.sequence_nr = _sequence_nr()

    def _deferred(self) -> list[tuple[weakref.ref[ManagedStorage], bool]]:
        deferred: list[tuple[weakref.ref[ManagedStorage], bool]] | None = getattr(self._local, "deferred", None)
        if deferred is None:
            deferred = self._local.deferred = []
        return deferred

    def submit_finished(self, transport: Transport) -> None:
        """Issues the copies whose operation is over. See [Note: Copies wait for their operation]."""
        deferred = self._deferred()
        if deferred and self._local.sequence_nr != _sequence_nr():
            self._local.deferred = []
            for reference, offloads in deferred:
                managed = reference()
                if managed is not None:  # else its graph is gone
                    managed.complete(offloads=offloads)
        transport.drop_released()

    # Using.

    def unpack(self, packed: Packed) -> torch.Tensor:
        if type(packed) is KeptTensor:
            return packed.unpack()
        assert isinstance(packed, PackedView)
        if self.in_forked_child:
            return packed.unpack()
        with self.lock:
            return self._use(packed)

    def _use(self, packed: PackedView) -> torch.Tensor:
        managed = packed.managed
        steps = self._steps
        if steps is None:
            self.submit_finished(managed.transport)
            tensor = packed.unpack()
            self.lookahead.used(managed)
            return tensor
        with steps.hook(managed.transport):
            self.submit_finished(managed.transport)
            with steps.reloading(managed.transport):
                tensor = packed.unpack()
            if not steps.used(managed):
                self.lookahead.used(managed)
        return tensor

    # Pausing.

    def pause(self, paused: bool) -> None:
        self._local.paused = getattr(self._local, "paused", 0) + (1 if paused else -1)


def _keep_dynamo_out(hook: Callable[..., object]) -> None:
    """torch.compile would trace a hook that runs amid compiled code, and all that it calls: no part of the program."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))


_keep_dynamo_out(Packer.pack)
_keep_dynamo_out(Packer.unpack)


def _bytes_to_manage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """The whole storage, so that all its views share one copy; of a large one that is hardly used, the part in use."""
    whole = storage.nbytes()
    if tensor.nbytes == whole:
        return 0, whole
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset()) * itemsize
    reach = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + itemsize * (1 + reach)
    if 2 * (last - first) < whole:
        return first, last - first
    return 0, whole


def _is_grad_leaf(tensor: torch.Tensor) -> bool:
    """A leaf may also be a view of a tensor without grad, and a view of a leaf is none: both need asking."""
    return tensor.requires_grad and tensor.is_leaf


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"
