"""Six published races of activation offloaders: each is the smallest offloader with that fault, with a mended twin.

They follow the descriptions in the reports and use torch.Stream and torch.Event alone. Tensors of the accelerator that
are allocated under a side stream stand in for pinned host memory: copies from and to the CPU's tensors wait on this
accelerator, as copies of pageable memory do on a GPU, and a race needs copies that do not wait. Such "host" memory
differs from pinned memory in one respect: once released, it is the side stream's next allocation, in that stream's
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KEPT_BACK = 2  # this many of the latest saves stay on the device


@dataclass(slots=True, eq=False)
class Offloaded:
    """The object that autograd holds instead of a tensor."""

    shape: torch.Tensor  # has no data: size, strides and dtype only
    host: torch.Tensor
    offloaded: torch.Event
    last_read: torch.Event | None = None
    number: int = 0


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


class Offloader(torch.autograd.graph.saved_tensors_hooks):
    """A correct offloader. It copies a save after its producer, and releases the source after the copy, a few saves
    later."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__(self.pack, self.unpack)
        self.mended = mended
        self.offload_stream = torch.Stream(device="deferred")
        self.reload_stream = self.offload_stream
        self.count = 0
        self._sources: list[tuple[Offloaded, torch.Tensor]] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor  # a parameter
        return self.offload(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        reloaded: torch.Tensor = self.reload(packed)
        return reloaded

    def offload(self, tensor: torch.Tensor) -> Offloaded:
        source = tensor.detach()
        self.release_sources(keep=KEPT_BACK)
        self.order_offload()
        with self.offload_stream:
            host = self.host_memory(source)
            host.copy_(source)
            packed = Offloaded(_shape_of(source), host, self.offload_stream.record_event(), number=self.count)
        self.count += 1
        self._sources.append((packed, source))
        return packed

    def reload(self, packed: Offloaded) -> torch.Tensor:
        target = self.reload_target(packed)
        self.order_reload(packed)
        with self.reload_stream:
            target.copy_(packed.host)
            packed.last_read = self.reload_stream.record_event()
        self.wait_for_reload(packed)
        return target

    # The faults below override these methods.

    def host_memory(self, source: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(source)

    def order_offload(self) -> None:
        self.offload_stream.wait_event(current_stream().record_event())

    def release_sources(self, keep: int) -> None:
        while len(self._sources) > keep:
            packed, _ = self._sources[0]
            current_stream().wait_event(packed.offloaded)
            del self._sources[0]

    def reload_target(self, packed: Offloaded) -> torch.Tensor:
        return torch.empty_like(packed.shape, device="deferred")

    def order_reload(self, packed: Offloaded) -> None:
        self.reload_stream.wait_event(current_stream().record_event())
        self.reload_stream.wait_event(packed.offloaded)

    def wait_for_reload(self, packed: Offloaded) -> None:
        assert packed.last_read is not None
        current_stream().wait_event(packed.last_read)

    def end_of_step(self) -> None:
        self.release_sources(keep=0)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


class Naive(Offloader):
    """Two streams. Without the mend no stream waits for the other."""

    def order_offload(self) -> None:
        if self.mended:
            super().order_offload()

    def order_reload(self, packed: Offloaded) -> None:
        if self.mended:
            super().order_reload(packed)

    def wait_for_reload(self, packed: Offloaded) -> None:
        if self.mended:
            super().wait_for_reload(packed)


class DeletedWhileAViewIsUsed(Offloader):
    """torchtune#1867: reloads are allocated on the copy stream, which waits for the node that used a reload before it
    releases that reload. The node hands out a view, which is read later, while the next reload overwrites it."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__(mended=mended)
        self._in_use: dict[int, torch.Tensor] = {}
        self._used: list[tuple[torch.Event, torch.Tensor]] = []
        self._offloaded: list[Offloaded] = []  # so that a reload gets the memory of reloads only

    def offload(self, tensor: torch.Tensor) -> Offloaded:
        self._offloaded.append(super().offload(tensor))
        return self._offloaded[-1]

    def reload_target(self, packed: Offloaded) -> torch.Tensor:
        with self.reload_stream:
            return torch.empty_like(packed.shape, device="deferred")

    def order_reload(self, packed: Offloaded) -> None:
        """One stream copies both ways, into memory of its own, so there is nothing to wait for."""

    def reload(self, packed: Offloaded) -> torch.Tensor:
        target = super().reload(packed)
        if self.mended:
            target.record_stream(current_stream())
        self._in_use[packed.number] = target
        before, self._used = self._used, []
        node = torch._C._current_autograd_node()
        assert node is not None
        node.register_hook(lambda *_: self._node_is_over(packed.number, before))
        return target

    def _node_is_over(self, number: int, before: list[tuple[torch.Event, torch.Tensor]]) -> None:
        self._used.append((current_stream().record_event(), self._in_use.pop(number)))
        for used, _ in before:
            self.reload_stream.wait_event(used)
        before.clear()

    def end_of_step(self) -> None:
        super().end_of_step()
        for used, _ in self._used:
            self.reload_stream.wait_event(used)
        self._used.clear()
        self._offloaded.clear()


class StreamOfConstruction(Offloader):
    """torchtune#2683: the stream that was current at construction is taken for the compute stream."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__(mended=mended)
        self._first_stream = current_stream()

    def _computing(self) -> torch.Stream:
        return current_stream() if self.mended else self._first_stream

    def order_offload(self) -> None:
        self.offload_stream.wait_event(self._computing().record_event())

    def order_reload(self, packed: Offloaded) -> None:
        self.reload_stream.wait_event(self._computing().record_event())
        self.reload_stream.wait_event(packed.offloaded)

    def release_sources(self, keep: int) -> None:
        while len(self._sources) > keep:
            packed, _ = self._sources[0]
            self._computing().wait_event(packed.offloaded)
            del self._sources[0]

    def wait_for_reload(self, packed: Offloaded) -> None:
        assert packed.last_read is not None
        self._computing().wait_event(packed.last_read)


class ClonesOnTheTransferStream(Offloader):
    """trl#7195: an offset view is cloned on the transfer stream, after the wait. A save that is still on the device at
    its use is returned unchanged: the compute stream then reads the transfer stream's clone, and nothing orders the
    two."""

    def offload(self, tensor: torch.Tensor) -> Offloaded:
        source = tensor.detach()
        if not source.storage_offset() and source.is_contiguous():
            return super().offload(source)
        if self.mended:
            return super().offload(source.clone())
        self.order_offload()
        with self.offload_stream:
            source = source.clone()
        return super().offload(source)

    def unpack(self, packed: Any) -> torch.Tensor:
        for offloaded, source in self._sources:
            if offloaded is packed:
                return source
        return super().unpack(packed)


class ReloadsBeforeItsOffload(Offloader):
    """Megatron#7398: a reload on demand runs on a stream of its own, and nothing orders it after its own offload."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__(mended=mended)
        self.reload_stream = torch.Stream(device="deferred")

    def order_reload(self, packed: Offloaded) -> None:
        packed.host.record_stream(self.reload_stream)
        self.reload_stream.wait_event(current_stream().record_event())
        if self.mended:
            self.reload_stream.wait_event(packed.offloaded)


class WaitsForItself(Offloader):
    """torchtitan#2581: asks for the current stream while the copy stream is current, and so waits for nothing."""

    def order_offload(self) -> None:
        computing = current_stream()
        with self.offload_stream:
            self.offload_stream.wait_stream(computing if self.mended else current_stream())


class PoolWithoutItsReaders(Offloader):
    """torchtitan#2581: host memory returns to a pool when its reload is issued, one save ahead of the use. The next
    forward overwrites it, and nothing orders that write after the reload."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__(mended=mended)
        self.reload_stream = torch.Stream(device="deferred")
        self._pool: list[tuple[torch.Tensor, torch.Event]] = []
        self._offloaded: list[Offloaded] = []
        self._ahead: dict[int, torch.Tensor] = {}  # reloads that are issued and not yet used, by number
        self._used: set[int] = set()

    def host_memory(self, source: torch.Tensor) -> torch.Tensor:
        for index in reversed(range(len(self._pool))):
            host, last_read = self._pool[index]
            if host.nbytes == source.nbytes:
                if self.mended:
                    self.offload_stream.wait_event(last_read)
                del self._pool[index]
                return torch.as_strided(host, source.size(), source.stride(), 0)
        return super().host_memory(source)

    def offload(self, tensor: torch.Tensor) -> Offloaded:
        packed = super().offload(tensor.contiguous())
        self._offloaded.append(packed)
        return packed

    def reload(self, packed: Offloaded) -> torch.Tensor:
        self._used.add(packed.number)
        target = self._ahead.pop(packed.number, None)
        if target is None:
            target = self._issue(packed)
        before = packed.number - 1
        if before >= 0 and before not in self._used and before not in self._ahead:
            self._ahead[before] = self._issue(self._offloaded[before])
        self.wait_for_reload(packed)
        return target

    def _issue(self, packed: Offloaded) -> torch.Tensor:
        target = self.reload_target(packed)
        self.order_reload(packed)
        with self.reload_stream:
            target.copy_(packed.host)
            packed.last_read = self.reload_stream.record_event()
        self._pool.append((packed.host, packed.last_read))
        return target


class OneCopyByAddress(Offloader):
    """ms-swift#10157: tensors with the same address and dtype share one copy, although one may be a transpose."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__(mended=mended)
        self._copies: dict[tuple[Any, ...], Offloaded] = {}
        self._held: list[torch.Tensor] = []  # so that no address is reused within a step

    def offload(self, tensor: torch.Tensor) -> Offloaded:
        key: tuple[Any, ...] = (tensor.data_ptr(), tensor.dtype)
        if self.mended:
            key += (tensor.size(), tensor.stride(), tensor._version)
        if key not in self._copies:
            self._copies[key] = super().offload(tensor)
            self._held.append(tensor.detach())
        return self._copies[key]

    def end_of_step(self) -> None:
        super().end_of_step()
        self._copies.clear()
        self._held.clear()
