"""Everything that moves bytes for one torch device: the native device, its pinned pool and its queue.

The current stream is read at every call, before anything else. Sources handed back by the queue are dropped here, on
the thread of a hook; nothing is dropped inside native code. A transport for tensors without data hands out addresses of
its own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vdnn import _C
from vdnn.runtime.storage.holders import HeldStorage

# What a machine without data may pin when nobody says: more than any model needs.
_FAKE_HOST_BYTES = 1 << 46
_FAKE_ALIGNMENT = 256
_NO_LIMIT_BYTES = 1 << 62
_MOST_HELD = 256


# What torch's own generated code asks, where torch is built for CUDA: a number, and no object is made.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _current_stream_handle(device: torch.device) -> int:
    if _raw_stream is not None and device.index is not None:
        return _raw_stream(device.index)
    return torch.cuda.current_stream(device).cuda_stream


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Byte limits of one transport. Zero as host budget means what the host's own limits allow."""

    host_budget_bytes: int = 0
    offload_window_bytes: int = 256 << 20
    reload_window_bytes: int = 256 << 20
    timed: bool = False  # every copy can be asked when it ran; small copies then go one by one


class Source(Protocol):
    """What the queue holds while a copy reads it."""

    def dropped(self) -> None:
        """The owner stream waits for the copy: the storage may go."""


@dataclass(frozen=True, slots=True)
class Departures:
    """What every source needs to know when it goes. Not the transport: its queue holds the sources, and no collector
    sees that cycle."""

    device: _C.Device
    takes_releases: bool  # a note of each is wanted
    streams: dict[_C.Stream, None]  # on which hooks have run, see [Note: Who allocated it]
    held: deque[HeldStorage]  # given up, and not freed by that


class Integrity(Protocol):
    """Compares what comes back with what left."""

    compared: int
    failed: int

    def hash(self, address: int, nbytes: int, stream: _C.Stream) -> torch.Tensor: ...

    def compare(self, label: str, left: torch.Tensor, address: int, nbytes: int, stream: _C.Stream) -> None: ...

    def finish_step(self, step: int) -> None: ...


class Transport:
    """One device's way to the host and back."""

    def __init__(
        self,
        torch_device: torch.device,
        device: _C.Device,
        options: TransportOptions,
        *,
        fake: bool = False,
        owns_device: bool = False,
        stream_of_torch: Callable[[], _C.Stream] | None = None,
    ) -> None:
        self.torch_device = torch_device
        self.device = device
        self.fake = fake
        self._owns_device = owns_device
        self._stream_of_torch = stream_of_torch
        # Only a checker acts on notes of reads and writes, and a simulated device on those of releases.
        self.is_checked = isinstance(device, _C.OrderingChecker)
        self.departures = Departures(device, not isinstance(device, _C.CudaDevice), {}, deque(maxlen=_MOST_HELD))
        self.streams = self.departures.streams
        self._options = options
        cap_bytes = options.host_budget_bytes or (_FAKE_HOST_BYTES if fake else 0)
        self.pool = _C.PinnedPool(device, cap_bytes=cap_bytes)
        batching = {"small_copy_bytes": 0} if options.timed else {}
        self.queue = _C.TransferQueue(
            device,
            self.pool,
            offload_window_bytes=options.offload_window_bytes,
            timed=options.timed,
            **batching,
        )
        self.reload_window_bytes = options.reload_window_bytes
        self.reload_in_flight_bytes = 0
        self.integrity: Integrity | None = None
        # On the CPU torch computes on the calling thread, whichever that is.
        self._calling_thread = device.adopt_stream(0) if torch_device.type == "cpu" else None
        self._adopted: dict[int, _C.Stream] = {}  # by the handle that CUDA has for it
        self._next_address = 1 << 20

    @property
    def held(self) -> deque[HeldStorage]:
        """What was given up, and not freed by that."""
        return self.departures.held

    def current_stream(self) -> _C.Stream:
        """The stream on which torch computes now, on this thread."""
        if self._calling_thread is not None:
            return self._calling_thread
        if self._stream_of_torch is not None:
            stream = self._stream_of_torch()
            self.streams[stream] = None
            return stream
        handle = _current_stream_handle(self.torch_device)
        try:
            return self._adopted[handle]
        except KeyError:
            stream = self._adopted[handle] = self.device.adopt_stream(handle)
            self.streams[stream] = None
            return stream

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Where it lies. Ask once for each storage: one without data gets an address of its own at every call."""
        if not self.fake:
            return storage.data_ptr()
        address = self._next_address
        self._next_address += -(-storage.nbytes() // _FAKE_ALIGNMENT) * _FAKE_ALIGNMENT + _FAKE_ALIGNMENT
        return address

    def set_windows(self, *, open_wide: bool) -> None:
        """How much the device may hold for copies in flight from the next copy on: what was asked for, or anything."""
        offload_bytes = _NO_LIMIT_BYTES if open_wide else self._options.offload_window_bytes
        self.reload_window_bytes = _NO_LIMIT_BYTES if open_wide else self._options.reload_window_bytes
        self.queue.set_offload_window(offload_bytes)

    def reload_window_is_full(self, nbytes: int) -> bool:
        """For so many more. Also for what is larger than the window: what waits to be used is not to cost more."""
        return self.reload_in_flight_bytes + nbytes > self.reload_window_bytes

    def drop_released(self) -> None:
        released: list[Source] = self.queue.take_released()  # type: ignore[assignment]
        for source in released:
            source.dropped()

    def close(self) -> None:
        """Waits for all copies, then gives everything back; the device too, if it was made for this."""
        with contextlib.ExitStack() as stack:  # each in its turn, also when the device is lost and all of them say so
            if self._owns_device:
                stack.callback(self.device.close)
            stack.callback(self.pool.close)
            stack.callback(self.drop_released)
            self.queue.close()
