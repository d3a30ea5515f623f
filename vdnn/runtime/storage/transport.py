"""Moves bytes for one torch device: owns the pinned pool and the transfer queue on top of the native device.

The current stream is read at every call, before anything else. The queue hands released sources back, and they are
released here, on the thread of a hook, never inside native code. A transport for tensors without data makes up
addresses.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vdnn import _C
from vdnn.runtime.storage.holders import HeldStorage

# The default host budget of a machine without data: more than any model needs.
_FAKE_HOST_BYTES = 1 << 46
_FAKE_ALIGNMENT = 256
_NO_LIMIT_BYTES = 1 << 62
_MAX_HELD = 256
# Host memory beyond this many times what plans need is given back.
_HOST_SLACK = 1.1
# The widest window by default: enough to keep the fastest link busy.
WINDOW_BYTES = 256 << 20


# The last bit of a result may depend on alignment, so a reload has the address of its original, modulo this. torch's
# CPU kernels look at 64 bytes, and cuBLASLt chooses its kernel by up to 256. torch's CUDA allocator aligns to 512.
_CPU_ALIGNMENT = 64
_CUDA_ALIGNMENT = 512

# torch's generated code calls this too. It returns a number without making an object; absent if torch has no CUDA.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def alignment_on(device: torch.device) -> int:
    """The number of bytes to which a reload on this device keeps the alignment of its original."""
    return _CUDA_ALIGNMENT if device.type == "cuda" else _CPU_ALIGNMENT


def _current_stream_handle(device: torch.device) -> int:
    if _raw_stream is not None and device.index is not None:
        return _raw_stream(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def streams_of_thread() -> list[int]:
    """This thread's current streams by their handles, one for each CUDA device; empty before torch begins with CUDA."""
    if _raw_stream is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [_raw_stream(index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Byte limits of one transport. A host budget of zero means the limit that the host itself sets."""

    host_budget_bytes: int = 0
    offload_window_bytes: int = WINDOW_BYTES
    reload_window_bytes: int = WINDOW_BYTES
    timed: bool = False  # records when each copy ran; small copies are then not batched


class Releasable(Protocol):
    """The source of a copy. The queue holds it while the copy reads it."""

    def release(self) -> None:
        """Releases the storage. Called once the owner stream waits for the copy."""


@dataclass(slots=True)
class ReleaseContext:
    """The facts that a source needs at its release.

    Sources refer to this and not to the transport: the transport's queue holds the sources, and the garbage collector
    does not see through native code, so that cycle would never be freed.
    """

    device: _C.Device
    notes_releases: bool  # the device acts on notes of releases
    streams: dict[_C.Stream, None]  # those of hooks and where sessions were entered, see [Note: Who allocated it]
    held: deque[HeldStorage]  # storages that were released but not freed
    changes: int = 0  # how often memory of the device was taken or released
    offloads: int = 0  # how often a copy to the host was issued: the stream waits until it fits into the window


class Copied(Protocol):
    """A managed storage that was copied to the host."""

    position: int  # in the order of saves


class Integrity(Protocol):
    """Compares reloaded storages with the bytes that were offloaded."""

    compared: int
    failed: int

    def hash(self, address: int, nbytes: int, stream: _C.Stream) -> torch.Tensor: ...

    def compare(self, label: str, before: torch.Tensor, address: int, nbytes: int, stream: _C.Stream) -> None: ...

    def finish_step(self, step: int) -> None: ...


class Transport:
    """The copies between one device and the host."""

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
        # Only an ordering checker acts on notes of reads and writes. A simulated device acts on notes of releases only.
        self.is_checked = isinstance(device, _C.OrderingChecker)
        # A GPU runs the codec's kernels only in a build with device code.
        self.has_kernels = device.info.kind != "cuda" or _C.device_code_present()
        notes_releases = not isinstance(device, _C.CudaDevice)
        self.release_context = ReleaseContext(device, notes_releases, {}, deque(maxlen=_MAX_HELD))
        self.streams = self.release_context.streams
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
        self.has_room: Callable[[int], bool] | None = None  # for a reload ahead of its use; None: as its window says
        self.fits_budget: Callable[[Transport, int], bool | None] | None = (
            None  # beyond the bytes that are allocated now
        )
        self.copied: deque[Callable[[], Copied | None]] = deque()  # to the host, and no Lookahead knows it
        self.integrity: Integrity | None = None
        self.alignment = alignment_on(torch_device)
        self._state_bytes = 0
        self.most_state_bytes = 0  # at one time
        # On the CPU torch computes on the calling thread. One adopted stream stands for all threads.
        self._calling_thread = device.adopt_stream(0) if torch_device.type == "cpu" else None
        self._adopted: dict[int, _C.Stream] = {}  # by CUDA's stream handle
        self._next_address = 1 << 20

    @property
    def held(self) -> deque[HeldStorage]:
        """Storages that were released but not freed, because another holder keeps them alive."""
        return self.release_context.held

    def current_stream(self) -> _C.Stream:
        """The stream on which torch computes now, on this thread."""
        if self._calling_thread is not None:
            return self._calling_thread
        if self._stream_of_torch is not None:
            stream = self._stream_of_torch()
            self.streams[stream] = None
            return stream
        return self.adopt_stream(_current_stream_handle(self.torch_device))

    def adopt_stream(self, handle: int) -> _C.Stream:
        """A stream of torch's by its handle. From now on it waits for storages that were released early."""
        try:
            return self._adopted[handle]
        except KeyError:
            stream = self._adopted[handle] = self.device.adopt_stream(handle)
            self.streams[stream] = None
            return stream

    def stream_probe(self) -> tuple[Callable[[], object] | None, object]:
        """A function that returns torch's current stream on the calling thread, and its present result. The function is
        None if there is only one stream."""
        if self._calling_thread is not None:
            return None, None
        if self._stream_of_torch is not None:
            return self._stream_of_torch, self._stream_of_torch()
        if _raw_stream is not None and self.torch_device.index is not None:
            probe = functools.partial(_raw_stream, self.torch_device.index)
            return probe, probe()
        return self.current_stream, self.current_stream()

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """The address of `storage`. Call once for each storage: one without data gets a new address at every call."""
        if not self.fake:
            return storage.data_ptr()
        address = self._next_address
        self._next_address += -(-storage.nbytes() // _FAKE_ALIGNMENT) * _FAKE_ALIGNMENT + _FAKE_ALIGNMENT
        return address

    def set_windows(self, *, open_wide: bool) -> None:
        """Sets the windows from the next copy on: to the limits of the options, or without a limit if `open_wide`."""
        offload_bytes = _NO_LIMIT_BYTES if open_wide else self._options.offload_window_bytes
        self.reload_window_bytes = _NO_LIMIT_BYTES if open_wide else self._options.reload_window_bytes
        self.queue.set_offload_window(offload_bytes)

    @property
    def in_flight_bytes(self) -> int:
        """Held on the device by copies in flight."""
        return self.queue.stats.offload_in_flight_bytes + self.reload_in_flight_bytes

    @property
    def state_bytes(self) -> int:
        """The bytes of the pool that training state takes: optimizer state, gradients and parameters."""
        return self._state_bytes

    @state_bytes.setter
    def state_bytes(self, nbytes: int) -> None:
        self._state_bytes = nbytes
        self.most_state_bytes = max(self.most_state_bytes, nbytes)

    @property
    def wide_window_bytes(self) -> int:
        """The wider of the two windows while they are not open wide."""
        return max(self._options.offload_window_bytes, self._options.reload_window_bytes)

    @property
    def narrow_window_bytes(self) -> int:
        """The narrower of the two windows while they are not open wide."""
        return min(self._options.offload_window_bytes, self._options.reload_window_bytes)

    def host_share_from_now(self) -> Callable[[], float]:
        """A function that returns the share that is taken then of the memory that the host can pin now."""
        pool = self.pool
        before = pool.stats
        free_bytes = max(1, before.cap_bytes - before.live_bytes)
        return lambda: (pool.stats.live_bytes - before.live_bytes) / free_bytes

    def fits(self, nbytes: int) -> bool:
        """True if the budget of the device has room for this many more bytes now."""
        return self.fits_budget is None or self.fits_budget(self, nbytes) is not False

    def fit_host_memory(self, nbytes: int, *, is_awaited: bool) -> None:
        """Pins enough host memory for `nbytes` and the training state, or returns idle pinned memory beyond that."""
        nbytes += self.state_bytes
        pinned_bytes = self.pool.stats.pinned_bytes
        if pinned_bytes > _HOST_SLACK * nbytes:
            self.pool.trim(nbytes)
        elif pinned_bytes < nbytes <= self.pool.stats.cap_bytes:
            self.pool.reserve(nbytes)
            if is_awaited:
                self.pool.wait_for_growth()

    def reload_window_is_full(self, nbytes: int) -> bool:
        """Would `nbytes` more exceed the window? Also true if `nbytes` alone exceeds it."""
        is_full = self.reload_in_flight_bytes + nbytes > self.reload_window_bytes
        return is_full or (self.has_room is not None and not self.has_room(nbytes))

    def release_sources(self) -> None:
        """Releases the sources whose owner streams wait for their copies. Does not block."""
        if not self.queue.may_have_released:
            return
        self.release_context.changes += 1
        released: list[Releasable] = self.queue.take_released()  # type: ignore[assignment]
        for source in released:
            source.release()

    def close(self) -> None:
        """Waits for all copies, then closes the queue and the pool, and the device if this transport owns it."""
        with contextlib.ExitStack() as stack:  # closes all of them, even if the device is lost and each one raises
            if self._owns_device:
                stack.callback(self.device.close)
            stack.callback(self.pool.close)
            stack.callback(self.release_sources)
            self.queue.close()
