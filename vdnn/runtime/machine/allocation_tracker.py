"""Counts the bytes of all live storages exactly, by a dispatch mode that keeps a weak reference to each.

Counts the bytes that programs ask for (torch.cuda calls them requested bytes), not the sizes that an allocator rounds
up to. The workspaces of libraries count only where a caller names them. Holds no storage. Works on fake tensors too, so
that the memory of a step that fits no machine can be counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vdnn.runtime.machine.repeated_step import Allocator
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.dispatch_entry import turns_dynamo_off
from vdnn.runtime.torch_internals.host_memory import is_host_memory

Operation = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
_FOREACH = "aten::_foreach_"
_entered: list[AllocationTracker] = []
_resize = torch.UntypedStorage.resize_


def _resize_and_notify(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for tracker in _entered:
        tracker.resized(storage)
    return result


def count_writes(func: Any, args: tuple[Any, ...]) -> None:
    """Counts the writes of an operation in place on a list, as the kernels of a GPU do. Those of the CPU leave it to an
    operation on each tensor, which counts nothing below a dispatch mode."""
    if func._schema.name.startswith(_FOREACH):
        torch.autograd.graph.increment_version([one for one in args[0] if not one.is_inference()])


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts the allocations of this thread and of its backward passes in the
    memory of the CPU, which stands in for a card's.

    `on_operation(func, args, kwargs, out)` is called after each operation that torch ran.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_operation: Operation | None = None
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._forks = forks.count
        self._lock = threading.RLock()  # storages may be freed on any thread, and while a method below runs
        self.live_bytes = 0
        self.peak_bytes = 0
        self._mark_peak_bytes = 0
        self.on_growth: Callable[[int], None] | None = None  # called with live_bytes whenever they have grown
        self.allocators: tuple[Allocator, ...] = ()  # replay the allocations that are counted from here on
        self.replays = True  # but nothing that is allocated while this is false

    def __enter__(self) -> AllocationTracker:
        super().__enter__()  # type: ignore[no-untyped-call]
        _entered.append(self)
        torch.UntypedStorage.resize_ = _resize_and_notify  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.remove(self)
        if not _entered:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Called if the owner of a storage resized it without an operation, as FSDP2 does to free parameters."""
        with self._lock:
            known = self._known.get(storage._cdata)
            if known is not None and known[0]() is storage:
                self._known[storage._cdata] = (known[0], storage.nbytes())
                self._replay(storage._cdata, True, storage.nbytes())
                self._count(storage.nbytes() - known[1])

    def track(self, tree: Any) -> None:
        """Counts tensors that were allocated before entry: models, inputs, lists of tensors."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.nn.Module):
                for tensor in [*leaf.parameters(), *leaf.buffers()]:
                    self._observe(tensor)
            elif isinstance(leaf, torch.Tensor):
                self._observe(leaf)

    def take_peak_bytes(self) -> int:
        """The peak since the last call, or since the beginning at the first call."""
        peak, self._mark_peak_bytes = self._mark_peak_bytes, self.live_bytes
        return peak

    def had_peak(self, nbytes: int) -> None:
        """Gives back a peak since the last call of take_peak_bytes() that a call in between has taken."""
        self._mark_peak_bytes = max(self._mark_peak_bytes, nbytes)

    def live_storages(self) -> dict[int, object]:
        """A token for each live storage, by its address. A storage that reuses an address has another token."""
        with self._lock:
            return {key: known[0] for key, known in self._known.items()}

    def live_bytes_by_address(self) -> dict[int, int]:
        """The bytes of each live storage, by its address."""
        with self._lock:
            return {key: known[1] for key, known in self._known.items()}

    def token_of(self, storage: torch.UntypedStorage) -> object | None:
        """The token of this storage in live_storages(), or None if it was never counted."""
        with self._lock:
            known = self._known.get(storage._cdata)
            return known[0] if known is not None and known[0]() is storage else None

    def reset_peak(self) -> None:
        self.peak_bytes = self._mark_peak_bytes = self.live_bytes

    def took(self, nbytes: int) -> None:
        """Called with bytes that were allocated for a moment, beyond those that are allocated now."""
        with self._lock:
            self._replay("workspace", False, nbytes)
            self._replay("workspace", True, 0)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + nbytes)
            self._mark_peak_bytes = max(self._mark_peak_bytes, self.live_bytes + nbytes)
            if self.on_growth is not None:
                self.on_growth(self.live_bytes + nbytes)

    def hold(self, nbytes: int) -> None:
        """Counts these bytes from now on: a library keeps them for the whole process."""
        with self._lock:
            self._replay(("held", self.live_bytes), False, nbytes)
            self._count(nbytes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the entry does

    @turns_dynamo_off
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # The storage of a wrapper such as DTensor has the size of all ranks' parts together. Its own dispatch runs
            # first, and calls this for the operations on the wrapped tensor.
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if out is None:
            count_writes(func, args)
        if self._forks != forks.count:
            return out  # a DataLoader worker inherits this mode, but its memory is its own
        if isinstance(out, torch.Tensor):
            self._observe(out)
        elif isinstance(out, (tuple, list)):
            for one in out:
                if isinstance(one, torch.Tensor):
                    self._observe(one)
        if self.on_operation is not None:
            self.on_operation(func, args, kwargs, out)
        return out

    def made(self, storage: torch.UntypedStorage) -> None:
        """Counts a new storage of the device, which an operation has made without dispatch."""
        if self._forks == forks.count:
            self._observe_storage(storage)

    def _observe(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        if tensor._is_zerotensor():
            return  # forward mode's zeros have a size but no memory
        storage = tensor.untyped_storage()
        if not is_host_memory(storage):
            self._observe_storage(storage)

    def _observe_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        nbytes = storage.nbytes()
        if type(nbytes) is not int:
            return  # a symbolic size: counting it would make it a constant of the traced program
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0]() is storage:
                if known[1] == nbytes:
                    return
                self._known[key] = (known[0], nbytes)  # resized by an operation
                self._replay(key, True, nbytes)
                self._count(nbytes - known[1])
                return
            if known is not None:  # the address was reused before the callback of the old storage ran
                self._replay(key, True, 0)
                self._count(-known[1])
            # torch keeps the Python wrapper of a storage alive as long as the native storage.
            self._known[key] = (weakref.ref(storage, lambda reference: self._forget(key, reference)), nbytes)
            self._replay(key, False, nbytes)
            self._count(nbytes)

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] is reference:
                del self._known[key]
                self._replay(key, True, 0)
                self._count(-known[1])

    def _replay(self, key: object, was_known: bool, nbytes: int) -> None:
        for allocator in self.allocators:
            if was_known:
                allocator.free(key)
            if self.replays:
                allocator.allocate(key, nbytes)

    def _count(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._mark_peak_bytes = max(self._mark_peak_bytes, self.live_bytes)
        if more_bytes > 0 and self.on_growth is not None:
            self.on_growth(self.live_bytes)
