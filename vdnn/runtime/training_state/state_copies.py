"""Copies state tensors between the host and one device, on the copy streams of the session.

A slice is fetched ahead of its step and leaves behind it; the bytes that come and those that leave are limited by the
windows of the session. Nothing here blocks the host except `finish`, and what needs memory that is not there yet.

A call that the driver refuses once is made up for: an order between two streams by waiting on the host, a fetch by
torch's own copy. A tensor that cannot leave stays on the device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vdnn import _C
from vdnn.errors import DriverError, VdnnError
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.spans import span
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.state_tensors import bytes_of

_TO_DEVICE, _TO_HOST = _C.CopyDirection.HOST_TO_DEVICE, _C.CopyDirection.DEVICE_TO_HOST


@dataclass(slots=True)
class Moving:
    """Tensors on the device with their host tensors, and the event at which the copies between them are complete."""

    tensors: list[torch.Tensor]
    hosts: list[HostTensor]
    addresses: list[int]
    stream: _C.Stream  # on which torch allocated the tensors
    complete: _C.Event
    nbytes: int


class StateCopies:
    """The copies of one optimizer's steps to and from one device."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.to_device_bytes = 0
        self.to_host_bytes = 0
        self._device = transport.device
        self._leaving: deque[Moving] = deque()
        self._leaving_bytes = 0
        self._waits: list[tuple[_C.Event, _C.Event]] = []  # around each wait of the compute stream

    # To the device.

    def fetch(self, hosts: list[HostTensor]) -> Moving:
        """Issues copies of `hosts` into new tensors, which may be used after `arrive`."""
        transport = self.transport
        tensors = [self._allocate(host.tensor) for host in hosts]
        addresses = [transport.address_of(tensor.untyped_storage()) for tensor in tensors]
        stream, queue = transport.current_stream(), transport.queue
        moving = Moving(tensors, hosts, addresses, stream, _C.Event(), bytes_of(tensors))
        try:
            with span("fetch state"):
                self._order(queue.reload_stream, self._point(stream))
                for host, address in zip(hosts, addresses, strict=True):
                    self._device.copy_async(address, host.block.address, host.nbytes, _TO_DEVICE, queue.reload_stream)
                moving.complete = self._point(queue.reload_stream)
        except DriverError:
            self._device.drain(queue.reload_stream)
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host.tensor)
        self.to_device_bytes += moving.nbytes
        return moving

    def arrive(self, moving: Moving) -> None:
        """Makes the compute stream wait for fetched tensors."""
        with span("wait for state"):
            self._stall(moving.stream, moving.complete)
        self._note(moving, _C.Access.WRITE, "step of the optimizer")

    # To the host.

    def leave(self, tensors: list[torch.Tensor], hosts: list[HostTensor]) -> bool:
        """Issues copies of `tensors` to `hosts`, and releases tensors that left before as the window needs it.

        False if the driver refuses: the tensors are then the only ones with these bytes."""
        transport = self.transport
        addresses = [transport.address_of(tensor.untyped_storage()) for tensor in tensors]
        stream, queue = transport.current_stream(), transport.queue
        moving = Moving(tensors, hosts, addresses, stream, _C.Event(), bytes_of(tensors))
        self._note(moving, _C.Access.WRITE, "state of the optimizer")
        try:
            with span("state leaves"):
                self._order(queue.offload_stream, self._point(stream))
                for host in hosts:
                    for event in host.block.last_uses:
                        self._order(queue.offload_stream, event)
                for host, address in zip(hosts, addresses, strict=True):
                    self._device.copy_async(host.block.address, address, host.nbytes, _TO_HOST, queue.offload_stream)
                moving.complete = self._point(queue.offload_stream)
        except DriverError:
            with contextlib.suppress(VdnnError):  # what was issued reads and writes memory that others get next
                self._device.drain(queue.offload_stream)
            return False
        for host in hosts:
            host.block.note_use(moving.complete)
        self.to_host_bytes += moving.nbytes
        self._leaving.append(moving)
        self._leaving_bytes += moving.nbytes
        while len(self._leaving) > 1 and self._leaving_bytes > transport.narrow_window_bytes:
            self._release_oldest()
        return True

    def finish(self) -> int:
        """Blocks until all that leaves is on the host, where it may then be read. Returns the nanoseconds that the
        compute stream waited for copies since the last call."""
        last = self._leaving[-1].complete if self._leaving else None
        while self._leaving:
            self._release_oldest()
        if last is not None:
            self._device.synchronize(last)
        waits, self._waits = self._waits, []
        return sum(self._device.elapsed_ns(begin, end) for begin, end in waits)

    def abandon(self, moving: Moving) -> None:
        """Releases tensors that were fetched and not used: their memory is not reused before the copies are over."""
        self._stall(moving.stream, moving.complete)
        self._note(moving, _C.Access.RELEASE, "unused state")

    def _release_oldest(self) -> None:
        oldest = self._leaving.popleft()
        self._leaving_bytes -= oldest.nbytes
        self._stall(oldest.stream, oldest.complete)
        self._note(oldest, _C.Access.RELEASE, "state released")

    # Memory and order.

    def _allocate(self, host: torch.Tensor) -> torch.Tensor:
        def allocate() -> torch.Tensor:
            return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.transport.torch_device)

        try:
            return allocate()
        except torch.OutOfMemoryError:
            if not self._leaving:
                raise
        self._device.synchronize(self._leaving[-1].complete)
        while self._leaving:
            self._release_oldest()
        return allocate()

    def _stall(self, stream: _C.Stream, event: _C.Event) -> None:
        """Makes the compute stream wait, and notes for how long."""
        with self._timed(stream):
            self._order(stream, event)

    @contextlib.contextmanager
    def _timed(self, stream: _C.Stream) -> Iterator[None]:
        begin = self._point(stream, timing=True)
        yield
        end = self._point(stream, timing=True)
        if not begin.empty and not end.empty:
            self._waits.append((begin, end))

    def _point(self, stream: _C.Stream, *, timing: bool = False) -> _C.Event:
        """The point that `stream` has reached; an empty event where that is over already."""
        try:
            return self._device.record(stream, timing=timing)
        except DriverError:
            if not timing:
                self._device.drain(stream)
            return _C.Event()

    def _order(self, stream: _C.Stream, event: _C.Event) -> None:
        try:
            self._device.wait(stream, event)
        except DriverError:
            self._device.synchronize(event)

    def _note(self, moving: Moving, access: _C.Access, label: str) -> None:
        is_noted = self.transport.release_context.notes_releases if access == _C.Access.RELEASE else False
        if self.transport.is_checked or is_noted:
            for address, host in zip(moving.addresses, moving.hosts, strict=True):
                self._device.note_access(address, host.nbytes, access, moving.stream, label)
