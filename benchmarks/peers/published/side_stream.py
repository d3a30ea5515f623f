"""A second stream of a virtual machine, for the copies of a modelled peer. Nothing is copied: only times are kept."""

from __future__ import annotations

from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine

_PINNED_BYTES = 1 << 40  # addresses only: without data, nothing is allocated


class SideStream:
    """Copies on a stream of their own. The compute stream and this one wait for each other only where asked to."""

    def __init__(self, machine: VirtualMachine) -> None:
        self._machine = machine
        self._device = machine.device
        self._stream = self._device.create_stream("copies of a peer")
        self._pinned = self._device.allocate_pinned(_PINNED_BYTES)
        self.to_host_bytes = 0
        self.to_device_bytes = 0

    def follow_compute(self) -> None:
        """Copies from now on begin behind what the compute stream has been given so far."""
        self.wait(self.mark_compute())

    def mark_compute(self) -> _C.Event:
        return self._device.record(self._machine.current_stream())

    def wait(self, event: _C.Event) -> None:
        self._device.wait(self._stream, event)

    def compute_waits(self, event: _C.Event) -> None:
        self._device.wait(self._machine.current_stream(), event)

    def offload(self, nbytes: int) -> _C.Event:
        """Issues a copy to the host, and returns the event of its end."""
        self.to_host_bytes += nbytes
        return self._copy(nbytes, _C.CopyDirection.DEVICE_TO_HOST)

    def reload(self, nbytes: int) -> _C.Event:
        """Issues a copy to the device, and returns the event of its end."""
        self.to_device_bytes += nbytes
        return self._copy(nbytes, _C.CopyDirection.HOST_TO_DEVICE)

    def _copy(self, nbytes: int, direction: _C.CopyDirection) -> _C.Event:
        source, target = (4096, self._pinned)
        if direction is _C.CopyDirection.HOST_TO_DEVICE:
            source, target = target, source
        self._device.copy_async(target, source, nbytes, direction, self._stream)
        return self._device.record(self._stream)
