"""What time it is on a device, and how much of its memory is allocated: read at the hooks of a watched step.

A mark is a point on the compute stream; what it means in nanoseconds is asked later, when the device has passed it, so
that reading waits for nothing. Memory is in requested bytes. Nothing here resets statistics that belong to the user.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine

Mark = Any  # opaque to all but the gauges that made it


class Gauges(ABC):
    """Of one device. `absent_bytes` is what would be allocated in addition if nothing had been moved: the recorder's.

    A keep-all peak is the highest of both together.
    """

    clock: str

    def __init__(self) -> None:
        self.absent_bytes = 0

    @abstractmethod
    def mark(self, stream: _C.Stream) -> Mark:
        """The point that `stream` has reached."""

    @abstractmethod
    def ns_between(self, begin: Mark, end: Mark) -> int:
        """May block until both have been passed."""

    @abstractmethod
    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        """From a mark to a timed event of a copy."""

    @abstractmethod
    def allocated_bytes(self) -> int: ...

    @abstractmethod
    def take_peaks(self) -> tuple[int, int]:
        """The highest allocated, and the highest of allocated and absent together, since asked last."""

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """A trial. What is allocated meanwhile counts for no peak but the one that is taken inside; on a clock that can
        be stopped it takes no time but what the marks inside say."""
        yield
        self.take_peaks()


class VirtualGauges(Gauges):
    """Of a machine that is not there: exact, and the same everywhere."""

    clock = "virtual"

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self._machine = machine
        self._device = machine.device
        self._tracker = machine.tracker
        self._peak_with_absent = 0
        machine.tracker.on_growth = self._grown

    def _grown(self, live_bytes: int) -> None:
        self._peak_with_absent = max(self._peak_with_absent, live_bytes + self.absent_bytes)

    def mark(self, stream: _C.Stream) -> Mark:
        aside_ns = self._machine.aside_ns
        return self._device.now_ns(stream) if aside_ns is None else aside_ns

    def ns_between(self, begin: Mark, end: Mark) -> int:
        return int(end - begin)

    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        return int(self._device.event_ns(event) - begin)

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        peak_bytes = self._tracker.peak_bytes
        self._machine.aside_ns = 0
        try:
            with super().unnoticed():
                yield
        finally:
            self._machine.aside_ns = None
            self._tracker.peak_bytes = peak_bytes

    def allocated_bytes(self) -> int:
        return self._tracker.live_bytes

    def take_peaks(self) -> tuple[int, int]:
        live = self._tracker.live_bytes
        with_absent = max(self._peak_with_absent, live + self.absent_bytes)
        self._peak_with_absent = live + self.absent_bytes
        return self._tracker.take_peak_bytes(), with_absent


class CudaGauges(Gauges):
    """Of a GPU: timed events, and torch's statistics.

    Those know one peak since the user's last reset. Between two hooks it cannot have been higher than what was
    allocated at the first and whatever was allocated since, nor than that peak if it did not rise: the lower of the
    two counts.
    """

    clock = "device"

    def __init__(self, torch_device: torch.device, device: _C.Device) -> None:
        super().__init__()
        self._device = device
        self._torch_device = torch_device
        self._last_bytes, self._last_total, self._last_peak = self._statistics()

    def _statistics(self) -> tuple[int, int, int]:
        statistics: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._torch_device)
        requested = statistics["requested_bytes"]["all"]
        return requested["current"], requested["allocated"], requested["peak"]

    def mark(self, stream: _C.Stream) -> Mark:
        return self._device.record(stream, timing=True)

    def ns_between(self, begin: Mark, end: Mark) -> int:
        return self._device.elapsed_ns(begin, end)

    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        return self._device.elapsed_ns(begin, event)

    def allocated_bytes(self) -> int:
        return self._statistics()[0]

    def take_peaks(self) -> tuple[int, int]:
        current, total, peak = self._statistics()
        highest = min(self._last_bytes + total - self._last_total, peak)
        if peak > self._last_peak:
            highest = peak
        highest = max(highest, current, self._last_bytes)
        self._last_bytes, self._last_total, self._last_peak = current, total, peak
        return highest, highest + self.absent_bytes
