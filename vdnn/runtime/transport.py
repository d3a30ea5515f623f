"""Everything that moves bytes for one torch device: the native device, its pinned pool and its queue.

The current stream is read at every call, before anything else. Sources handed back by the queue are dropped here, on
the thread of a hook; nothing is dropped inside native code.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

import torch

from vdnn import _C


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Byte limits of one transport. Zero as host budget means what the host's own limits allow."""

    host_budget_bytes: int = 0
    offload_window_bytes: int = 256 << 20
    reload_window_bytes: int = 256 << 20


class Source(Protocol):
    """What the queue holds while a copy reads it."""

    def dropped(self) -> None:
        """The owner stream waits for the copy: the storage may go."""


class Transport:
    """One device's way to the host and back."""

    def __init__(self, torch_device: torch.device, device: _C.Device, options: TransportOptions) -> None:
        self.torch_device = torch_device
        self.device = device
        self.pool = _C.PinnedPool(device, cap_bytes=options.host_budget_bytes)
        self.queue = _C.TransferQueue(
            device,
            self.pool,
            offload_window_bytes=options.offload_window_bytes,
            reload_window_bytes=options.reload_window_bytes,
        )
        self.reload_window_bytes = options.reload_window_bytes
        self.reload_in_flight_bytes = 0
        self._is_cuda = torch_device.type == "cuda"

    def current_stream(self) -> _C.Stream:
        """The stream on which torch computes now, on this thread."""
        if self._is_cuda:
            return self.device.adopt_stream(torch.cuda.current_stream(self.torch_device).cuda_stream)
        return self.device.adopt_stream(0)

    def drop_released(self) -> None:
        released: list[Source] = self.queue.take_released()  # type: ignore[assignment]
        for source in released:
            source.dropped()

    def close(self) -> None:
        """Waits for all copies, then gives everything back."""
        with contextlib.ExitStack() as stack:  # each in its turn, also when the device is lost and all of them say so
            stack.callback(self.device.close)
            stack.callback(self.pool.close)
            stack.callback(self.drop_released)
            self.queue.close()
