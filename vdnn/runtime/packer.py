"""The two hooks: what autograd hands over at a save, and what it gets back at a use.

[Note: Copies wait for their operation] An operation may pack a tensor that its kernel fills only afterwards (rrelu does
so with its noise). A copy is therefore issued when the operation is over: at the first hook that finds autograd's
sequence number moved on, on the same thread. Until then the storage simply is still on the device.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import torch

from vdnn.planning.policies import OnlinePolicy, SaveFacts
from vdnn.runtime.counters import Counters, Kept
from vdnn.runtime.kept import KeptTensor
from vdnn.runtime.module_watch import ModuleWatch, is_conv
from vdnn.runtime.residency import ManagedStorage, PackedView
from vdnn.runtime.storage_table import ManagedTable, StorageSet
from vdnn.runtime.transport import Transport
from vdnn.runtime.version_check import counter_of

Packed = KeptTensor | PackedView
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Packer:
    """Packs and unpacks for one session. Its methods run inside autograd, on any thread."""

    def __init__(
        self,
        policy: OnlinePolicy,
        min_bytes: int,
        counters: Counters,
        modules: ModuleWatch,
        marked: StorageSet,
        transport_for: Callable[[torch.device], Transport | None],
    ) -> None:
        self._policy = policy
        self._min_bytes = max(min_bytes, 1)  # an empty tensor has nothing to move
        self._counters = counters
        self._modules = modules
        self._marked = marked
        self._transport_for = transport_for
        self._table = ManagedTable()
        self._order: list[weakref.ref[ManagedStorage]] = []
        self._positions: weakref.WeakKeyDictionary[ManagedStorage, int] = weakref.WeakKeyDictionary()
        self._last_used = 0  # position of the last use, and up to where reloads were issued before it
        self._ahead = 0
        self._local = threading.local()
        self._pid = os.getpid()

    # Saving.

    def pack(self, tensor: torch.Tensor) -> Packed:
        counters = self._counters
        counters.saves += 1
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN or tensor.is_quantized:
            return self._keep(tensor, Kept.SUBCLASS, 0)
        nbytes = tensor.nbytes
        counters.saved_bytes += nbytes
        # By what is held, not by what is seen: a small view may be the last holder of a large storage.
        if tensor.untyped_storage().nbytes() < self._min_bytes or not nbytes:
            return self._keep(tensor, Kept.SMALL, nbytes)
        reason = self._reason_to_keep(tensor)
        if reason is not None:
            return self._keep(tensor, reason, nbytes)
        transport = self._transport_for(tensor.device)
        if transport is None or os.getpid() != self._pid:
            return self._keep(tensor, Kept.OTHER_DEVICE, nbytes)
        self.submit_finished(transport)
        return self._take(tensor, transport)

    def _keep(self, tensor: torch.Tensor, reason: Kept, nbytes: int) -> KeptTensor:
        self._counters.keep(reason, nbytes)
        return KeptTensor(tensor)

    def _reason_to_keep(self, tensor: torch.Tensor) -> Kept | None:
        if getattr(self._local, "paused", 0):
            return Kept.PAUSED
        storage = tensor.untyped_storage()
        base = tensor if tensor._base is None else tensor._base
        if storage in self._modules.parameters or _is_grad_leaf(base) or _is_grad_leaf(tensor):
            return Kept.PARAMETER
        if _is_cast_of_parameter(base):
            return Kept.PARAMETER_CAST
        if storage in self._marked or self._modules.in_marked():
            return Kept.MARKED
        module = self._modules.innermost()
        kind = "" if module is None else type(module).__name__
        if not self._policy.offloads(SaveFacts(storage.nbytes(), kind, is_conv(module))):
            return Kept.POLICY
        return None

    def _take(self, tensor: torch.Tensor, transport: Transport) -> PackedView:
        storage = tensor.untyped_storage()
        begin, nbytes = _bytes_to_manage(tensor, storage)
        managed = self._table.find(storage, begin, nbytes, tensor)
        if managed is None:
            managed = ManagedStorage(transport, self._counters, storage, begin, nbytes, counter_of(tensor))
            self._table.add(storage, managed)
            self._note_order(managed)
            self._deferred().append(weakref.ref(managed))
            self._local.sequence_nr = _sequence_nr()
        else:
            self._counters.shared_saves += 1
        return PackedView(managed, tensor)

    def _note_order(self, managed: ManagedStorage) -> None:
        if len(self._order) > 64 and len(self._order) > 4 * len(self._positions):
            self._order = [reference for reference in self._order if reference() is not None]
            for index, reference in enumerate(self._order):
                known = reference()
                if known is not None:
                    self._positions[known] = index
            self._last_used = 0  # positions have moved: begin anew
        self._positions[managed] = len(self._order)
        self._order.append(weakref.ref(managed))

    # Copies wait for their operation.

    def _deferred(self) -> list[weakref.ref[ManagedStorage]]:
        deferred: list[weakref.ref[ManagedStorage]] | None = getattr(self._local, "deferred", None)
        if deferred is None:
            deferred = self._local.deferred = []
        return deferred

    def submit_finished(self, transport: Transport) -> None:
        """Issues the copies whose operation is over. See [Note: Copies wait for their operation]."""
        deferred = self._deferred()
        if deferred and self._local.sequence_nr != _sequence_nr():
            self._local.deferred = []
            for reference in deferred:
                managed = reference()
                if managed is not None:  # else its graph is gone
                    managed.offload()
        transport.drop_released()

    # Using.

    def unpack(self, packed: Packed) -> torch.Tensor:
        if type(packed) is KeptTensor:
            return packed.unpack()
        assert isinstance(packed, PackedView)
        managed = packed.managed
        self.submit_finished(managed.transport)
        tensor = packed.unpack()
        self._reload_ahead(managed)
        return tensor

    def _reload_ahead(self, managed: ManagedStorage) -> None:
        """Backward goes the way of forward in reverse: reloads what was saved before, as far as the window reaches."""
        position = self._positions.get(managed)
        if position is None:
            return
        # Within one backward it goes on where it stopped: looking at everything again at each use would take a step of
        # n saves n * n looks.
        begin = self._ahead if position < self._last_used else position
        self._last_used = position
        for index in range(min(begin, position, len(self._order)) - 1, -1, -1):
            self._ahead = index + 1
            earlier = self._order[index]()
            if earlier is None or earlier.transport is not managed.transport:
                continue
            if not earlier.reload_early():
                return
        self._ahead = 0

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
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset()) * itemsize
    reach = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + itemsize * (1 + reach)
    whole = storage.nbytes()
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
