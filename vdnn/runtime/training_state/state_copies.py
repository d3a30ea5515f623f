"""Copies state tensors between the host and one device, on the copy streams of the session.

A slice is fetched before its step and offloaded after it. The windows of the session limit the bytes in flight each
way. Nothing here blocks the host, except `finish` and an allocation that has to wait for memory.

[Note: Interrupted copies] An exception such as KeyboardInterrupt may come at any line, also between the issue of a copy
and the line that notes it. Then the last reference to its tensors goes while it is under way, and who gets their memory
next would meet its bytes. So copies that no stream was made to wait for are waited for before their tensors are freed.

If the driver refuses a call, a fallback does the same: the host waits instead of a stream, and torch copies instead of
the copy stream. A tensor whose offload is refused stays on the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vdnn import _C
from vdnn.errors import DriverError, VdnnError
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.memory_holders import natively_held
from vdnn.runtime.torch_internals.spans import span
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_inference_mode
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.state_tensors import bytes_of

# The widest window each way. Larger slices keep a link no busier, and are memory that the activations do not get.
LARGEST_WINDOW_BYTES = 64 << 20
_TO_DEVICE, _TO_HOST = _C.CopyDirection.HOST_TO_DEVICE, _C.CopyDirection.DEVICE_TO_HOST


@dataclass(slots=True)
class StateCopy:
    """Tensors on the device with their host tensors, and the event at which the copies between them are complete."""

    tensors: list[torch.Tensor]
    hosts: list[HostTensor]
    addresses: list[int]
    stream: _C.Stream  # on which torch allocated the tensors
    complete: _C.Event
    nbytes: int
    wait: Callable[[], None] | None = None  # blocks until the copies are over; None once a stream or the host waits

    def __del__(self) -> None:
        """See [Note: Interrupted copies]."""
        if self.wait is not None:
            with contextlib.suppress(VdnnError):  # the device is closed or lost, and copies nothing any more
                self.wait()


class StateCopies:
    """The copies of one optimizer's steps to and from one device."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.window_bytes = min(transport.narrow_window_bytes, LARGEST_WINDOW_BYTES)
        self.to_device_bytes = 0
        self.to_host_bytes = 0
        self._device = transport.device
        self._leaving: deque[StateCopy] = deque()
        self._leaving_bytes = 0
        self._waits: list[tuple[_C.Event, _C.Event]] = []  # around each wait of the compute stream

    # To the device.

    def fetch(self, hosts: list[HostTensor]) -> StateCopy:
        """Issues copies of `hosts` into new tensors, which may be used after `arrive`."""
        return self._reload([self._allocate(host.tensor) for host in hosts], hosts, "fetch state")

    def order_behind_uses(self, hosts: list[HostTensor]) -> None:
        """Lets later fetches wait for copies of `hosts` that are under way."""
        for host in hosts:
            for event in host.block.last_uses:
                self._order(self.transport.queue.reload_stream, event)

    def arrive(self, moving: StateCopy) -> None:
        """Makes the compute stream wait for fetched tensors."""
        with span("wait for state"):
            self._stall_for(moving)
        self._note(moving, _C.Access.WRITE, "step of the optimizer")

    def arrive_to_be_read(self, moving: StateCopy, label: str, *, is_timed: bool = False) -> None:
        """The same for tensors that are only read."""
        with span("wait for state"):
            (self._stall_for if is_timed else self._order_behind)(moving)
        self._note(moving, _C.Access.READ, label)

    def drop(self, moving: StateCopy, label: str) -> None:
        """Releases tensors that were fetched and only read, now or in a part of `label`."""
        self._order_behind(moving)
        self._note(moving, _C.Access.READ, label)
        self._release(moving)

    # To the host.

    def leave(self, tensors: list[torch.Tensor], hosts: list[HostTensor]) -> bool:
        """Issues copies of `tensors` to `hosts`, and releases tensors that left before as the window needs it.

        False if the driver refuses: the tensors are then the only ones with these bytes."""
        moving = self._made(tensors, hosts)
        self._note(moving, _C.Access.WRITE, "state of the optimizer")
        if not self._issue(moving, _TO_HOST, "state leaves"):
            with contextlib.suppress(VdnnError):  # copies already issued use memory that others get next
                self._device.drain(self.transport.queue.offload_stream)
            return False
        self.to_host_bytes += moving.nbytes
        self._leaving.append(moving)
        self._leaving_bytes += moving.nbytes
        while len(self._leaving) > 1 and self._leaving_bytes > self.window_bytes:
            self._release_oldest()
        return True

    # To the host and back, while the device keeps its tensors.

    def mirror(self, tensors: list[torch.Tensor], hosts: list[HostTensor]) -> StateCopy:
        """Issues copies of `tensors` to `hosts`, which may be read after `settle`. The tensors stay."""
        moving = self._made(tensors, hosts)
        self._note(moving, _C.Access.WRITE, "parameters and gradients")
        if not self._issue(moving, _TO_HOST, "gradients leave"):
            self._device.drain(self.transport.queue.offload_stream)
            for tensor, host in zip(tensors, hosts, strict=True):
                host.tensor.copy_(tensor)
        self.to_host_bytes += moving.nbytes
        return moving

    def write_back(self, mirrored: StateCopy, positions: list[int]) -> StateCopy:
        """Issues copies of the hosts at `positions` to their tensors. The compute stream waits for them."""
        tensors = [mirrored.tensors[position] for position in positions]
        moving = self._reload(tensors, [mirrored.hosts[position] for position in positions], "parameters return")
        self._stall_for(moving)
        self._note(moving, _C.Access.READ, "stepped parameters")
        return moving

    def settle(self, moving: StateCopy) -> None:
        """Blocks until the copies are over."""
        self._settle(moving.complete)
        moving.wait = None

    def settle_uses(self, host: HostTensor) -> None:
        """Blocks until copies that used the memory of `host` before are over, so that the CPU may write it."""
        for event in host.block.last_uses:
            self._settle(event)

    def finish(self) -> int:
        """Blocks until all that leaves is on the host, where it may then be read. Returns the nanoseconds that the
        compute stream waited for copies since the last call."""
        last = self._leaving[-1].complete if self._leaving else None
        while self._leaving:
            self._release_oldest()
        if last is not None:
            self._settle(last)
        return self.waited_ns()

    def waited_ns(self) -> int:
        """The nanoseconds that the compute stream waited for copies since the last call. Blocks until they are over."""
        waits, self._waits = self._waits, []
        return sum(self._ns_between(begin, end) for begin, end in waits)

    def release_what_left(self, *, only_if_over: bool) -> None:
        """Releases tensors that left: all of them, or those whose copies are over. Does not block the host."""
        while self._leaving and (not only_if_over or self._is_over(self._leaving[0].complete)):
            self._release_oldest()

    def abandon(self, moving: StateCopy) -> None:
        """Releases tensors that were fetched and not used: their memory is not reused before the copies are over."""
        self._stall_for(moving)
        self._release(moving)

    def _release_oldest(self) -> None:
        oldest = self._leaving.popleft()
        self._leaving_bytes -= oldest.nbytes
        self._stall_for(oldest)
        self._release(oldest)

    # Both ways.

    def _made(self, tensors: list[torch.Tensor], hosts: list[HostTensor]) -> StateCopy:
        addresses = [self.transport.address_of(tensor.untyped_storage()) for tensor in tensors]
        return StateCopy(tensors, hosts, addresses, self.transport.current_stream(), _C.Event(), bytes_of(tensors))

    def _reload(self, tensors: list[torch.Tensor], hosts: list[HostTensor], name: str) -> StateCopy:
        """Issues copies of `hosts` to `tensors`. If the driver refuses, torch copies."""
        moving = self._made(tensors, hosts)
        if not self._issue(moving, _TO_DEVICE, name):
            self._device.drain(self.transport.queue.reload_stream)
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host.tensor)
        self.to_device_bytes += moving.nbytes
        return moving

    def _issue(self, moving: StateCopy, direction: _C.CopyDirection, name: str) -> bool:
        """Issues the copies behind the compute stream, and those to the host behind earlier uses of its memory.

        False if the driver refuses one; those before it may still run."""
        queue, is_out = self.transport.queue, direction is _TO_HOST
        stream = queue.offload_stream if is_out else queue.reload_stream
        moving.wait = functools.partial(_drain, self._device, stream, forks.count)
        try:
            with span(name):
                self._order(stream, self._point(moving.stream))
                for event in [event for host in moving.hosts for event in host.block.last_uses if is_out]:
                    self._order(stream, event)
                for address, host in zip(moving.addresses, moving.hosts, strict=True):
                    ends = (host.block.address, address) if is_out else (address, host.block.address)
                    self._device.copy_async(*ends, host.nbytes, direction, stream)
                moving.complete = self._point(stream)
        except DriverError:
            moving.wait = None  # the caller waits for those that were issued
            return False
        for host in moving.hosts:
            host.block.note_use(moving.complete)
        return True

    # Memory and order.

    def _allocate(self, host: torch.Tensor) -> torch.Tensor:
        def allocate() -> torch.Tensor:
            device = self.transport.torch_device
            with outside_of_inference_mode():  # the program reads a gradient there, which autograd adds to later
                return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)

        try:
            return allocate()
        except torch.OutOfMemoryError:
            if not self._leaving:
                raise
        self._settle(self._leaving[-1].complete)
        while self._leaving:
            self._release_oldest()
        return allocate()

    def _stall_for(self, moving: StateCopy) -> None:
        """Makes the compute stream wait for copies, and notes for how long."""
        with self._timed(moving.stream):
            self._order_behind(moving)

    def _order_behind(self, moving: StateCopy) -> None:
        self._order(moving.stream, moving.complete)
        moving.wait = None

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
            self._settle(event)

    def _is_over(self, event: _C.Event) -> bool:
        try:
            return self._device.query(event)
        except DriverError:
            return False

    def _settle(self, event: _C.Event) -> None:
        """Blocks the host until `event` has happened."""
        try:
            self._device.synchronize(event)
        except DriverError:
            self._device.synchronize(event)

    def _ns_between(self, begin: _C.Event, end: _C.Event) -> int:
        try:
            return self._device.elapsed_ns(begin, end)
        except DriverError:
            return 0  # a figure for the report is not worth a step

    def _note(self, moving: StateCopy, access: _C.Access, label: str) -> None:
        if self.transport.is_checked:
            for address, host in zip(moving.addresses, moving.hosts, strict=True):
                self._device.note_access(address, host.nbytes, access, moving.stream, label)

    def _release(self, moving: StateCopy) -> None:
        """Drops the tensors. Notes a release only if nobody else holds the storage: loaded state may be part of a dict
        that the user keeps."""
        storages = [tensor.untyped_storage() for tensor in moving.tensors]
        moving.tensors.clear()
        if not self.transport.release_context.notes_releases:
            return
        for storage, address, host in zip(storages, moving.addresses, moving.hosts, strict=True):
            if natively_held(storage._cdata) == 1:
                self._device.note_access(address, host.nbytes, _C.Access.RELEASE, moving.stream, "state released")


def _drain(device: _C.Device, stream: _C.Stream, count: int) -> None:
    if count == forks.count:  # a child has no device
        device.drain(stream)
