"""Gauges of the deferred accelerator, so that sessions with budgets run on it: its memory, and events for its time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from deferred.deferred_accelerator import DeferredAccelerator
from vdnn import _C
from vdnn.runtime.machine.gauges import CudaGauges, Gauges, Reading


class _NoIntervals:
    """No peak is known between two hooks but the one since the last reset."""

    def step_begins(self, read: Callable[[], Reading]) -> None: ...
    def step_ended(self, read: Callable[[], Reading]) -> None: ...
    def peak_bytes(self, before: Reading, now: Reading) -> int | None:
        return None


class DeferredGauges(CudaGauges):
    """Reads the accelerator where those of a GPU read torch's allocator."""

    def __init__(self, torch_device: torch.device, device: _C.Device, accelerator: DeferredAccelerator) -> None:
        Gauges.__init__(self)
        self._device, self._torch_device, self._accelerator = device, torch_device, accelerator
        self._intervals = _NoIntervals()  # type: ignore[assignment]
        self._last = self._read()

    def _read(self) -> Reading:
        memory = self._accelerator.memory
        return Reading(memory.allocated_bytes, memory.allocated_bytes, memory.peak_bytes, 0, 0)

    def fall_behind(self, stream: _C.Stream) -> bool:
        return False

    def host_waits(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()
