"""Bytes of storages that are alive, exactly, as torch makes them: a dispatch mode with a weak reference to each.

Counts what programs ask for (what torch.cuda calls requested bytes), not what an allocator rounds up, and not the
workspaces that kernels allocate for themselves. Holds no storage. Works on fake tensors, so that the memory of a step
that fits no machine can be known.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vdnn.runtime.torch_internals import forks

Operation = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
_entered: list[AllocationTracker] = []
_resize = torch.UntypedStorage.resize_


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    outcome = _resize(storage, size)
    for tracker in _entered:
        tracker.resized(storage)
    return outcome


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, sees what this thread allocates on devices of type `device_type`, and in backward too.

    `on_operation(func, args, kwargs, out)` is called after each operation that torch ran.
    """

    def __init__(self, device_type: str = "cpu", on_operation: Operation | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._on_operation = on_operation
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._forks = forks.count
        self._lock = threading.RLock()  # storages may die on any thread, also amid what happens here
        self.live_bytes = 0
        self.peak_bytes = 0
        self._mark_peak_bytes = 0
        self.on_growth: Callable[[int], None] | None = None  # told the live bytes whenever they have grown

    def __enter__(self) -> AllocationTracker:
        super().__enter__()  # type: ignore[no-untyped-call]
        _entered.append(self)
        torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.remove(self)
        if not _entered:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """By its owner, without an operation: FSDP2 frees unsharded parameters so."""
        with self._lock:
            known = self._known.get(storage._cdata)
            if known is not None and known[0]() is storage:
                self._known[storage._cdata] = (known[0], storage.nbytes())
                self._count(storage.nbytes() - known[1])

    def track(self, tree: Any) -> None:
        """Counts what was allocated before: models, inputs, lists of tensors."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.nn.Module):
                for tensor in [*leaf.parameters(), *leaf.buffers()]:
                    self._see(tensor)
            elif isinstance(leaf, torch.Tensor):
                self._see(leaf)

    def take_peak_bytes(self) -> int:
        """The highest since it was taken last, or since now if that was never."""
        peak, self._mark_peak_bytes = self._mark_peak_bytes, self.live_bytes
        return peak

    def reset_peak(self) -> None:
        self.peak_bytes = self._mark_peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # Of a tensor that wraps others (DTensor) the storage is as large as all ranks' together. Its own dispatch
            # goes first, and what it does with what it wraps comes here.
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._forks != forks.count:
            return out  # in a loader's worker, which has our mode and none of our memory
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for one in out:
                if isinstance(one, torch.Tensor):
                    self._see(one)
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, out)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type != self._device_type:
            return
        if tensor._is_zerotensor():
            return  # forward mode's zeros have a size and no memory
        storage = tensor.untyped_storage()
        key = storage._cdata
        nbytes = storage.nbytes()
        if type(nbytes) is not int:
            return  # a size that a tracer follows: to count it would fix it
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0]() is storage:
                if known[1] == nbytes:
                    return
                self._known[key] = (known[0], nbytes)  # resized by an operation
                self._count(nbytes - known[1])
                return
            if known is not None:  # its address was taken by another before its end was told
                self._count(-known[1])
            # The wrapper lives as long as the native storage: it is kept for whoever asks for it next.
            self._known[key] = (weakref.ref(storage, lambda gone: self._forget(key, gone)), nbytes)
            self._count(nbytes)

    def _forget(self, key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] is gone:
                del self._known[key]
                self._count(-known[1])

    def _count(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._mark_peak_bytes = max(self._mark_peak_bytes, self.live_bytes)
        if more_bytes > 0 and self.on_growth is not None:
            self.on_growth(self.live_bytes)
