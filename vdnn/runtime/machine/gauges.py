"""The clock of a device and the count of its allocated memory, which the hooks of a watched step read.

A mark is a point on a stream. Its time is read later, when the device has passed it, so that no hook waits. Memory is
in requested bytes. Gauges never reset the memory statistics of torch, which belong to the user.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.machine.device_lag import DeviceLag
from vdnn.runtime.machine.interval_peaks import IntervalPeaks, Reading
from vdnn.runtime.machine.virtual_machine import VirtualMachine

Mark = Any  # opaque: only the gauges that made a mark can read it


class Peaks(NamedTuple):
    """One reading: the peaks since the last one, of allocated bytes and of allocated and absent bytes together, and the
    bytes that are allocated now."""

    peak_bytes: int
    with_absent_bytes: int
    allocated_bytes: int


class Gauges(ABC):
    """The clock and memory count of one device.

    The recorder sets `absent_bytes`: the bytes that would be allocated in addition if everything were kept. A keep-all
    peak is the highest sum of allocated and absent bytes.
    """

    clock: str
    reads_ends = True  # also at the end of a hook that has done nothing on the device

    def __init__(self) -> None:
        self.absent_bytes = 0
        # The peak of a step that is read once, at its end, is its own only if it is above this.
        self.peak_before_bytes = 0
        self._trial_peak_bytes = 0
        self._is_unnoticed = False
        self._is_unread = False  # a trial has ended in this hook, and its end was not read
        self.has_tried = False  # a trial has begun in this hook

    @abstractmethod
    def mark(self, stream: _C.Stream) -> Mark:
        """Marks the point that `stream` has reached. Does not block."""

    @abstractmethod
    def fall_behind(self, stream: _C.Stream) -> bool:
        """Called before an interval whose time counts. Lets the device wait until the host has issued the interval, if
        it would otherwise wait within it: then the interval's time is the device's, and not the host's. True if the
        device will wait."""

    def host_waits(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the host waits for the device between two intervals. That time is not the host's own."""
        return contextlib.nullcontext()

    def issued_ns(self) -> int:
        """The time in which the host issued all operations so far. 0 if that is not known."""
        return 0

    @abstractmethod
    def ns_between(self, begin: Mark, end: Mark) -> int:
        """Nanoseconds from one mark to another. May block until the device has passed both."""

    @abstractmethod
    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        """Nanoseconds from a mark to a timed event of a copy."""

    @abstractmethod
    def allocated_bytes(self) -> int: ...

    @abstractmethod
    def take_peaks(self) -> Peaks:
        """Reads the statistics: the peaks since the last call."""

    def hook_begins(self) -> Peaks:
        """The same as take_peaks, where a hook begins."""
        self._is_unread = self.has_tried = False
        return self.take_peaks()

    def hook_ends(self, *, has_changed: bool) -> Peaks:
        """The same where it ends. `has_changed`: it has allocated or freed something, apart from trials. Gauges that
        take long to read do not read again if nothing has changed."""
        return self.take_peaks()

    def allocated_in_hook(self, *, has_changed: bool) -> int:
        """The bytes that are allocated now, between hook_begins and hook_ends."""
        return self.allocated_bytes()

    def step_begins(self) -> None:
        """Called before the first hook of a step, from which peaks count."""
        self.take_peaks()

    def step_ended(self) -> Peaks:
        """The same as take_peaks, behind the last hook of a step."""
        return self.take_peaks()

    @abstractmethod
    def pause(self) -> None:
        """Called when the session is left, be it within a step."""

    @abstractmethod
    def resume(self) -> None:
        """Counts again, after the gauges of another session did."""

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """A context for a trial: its allocations count only for a peak that is taken inside, and for that of trials. On
        a virtual machine the clock of the step stands still, and marks that are made inside measure the trial."""
        self._is_unnoticed = self._is_unread = self.has_tried = True
        try:
            yield
            self.take_peaks()
            self._is_unread = False
        finally:
            self._is_unnoticed = False

    def take_trial_peak(self) -> int:
        """The most that was allocated in trials since the last call; 0 if there were none. Without data a trial takes
        other memory than it would."""
        peak_bytes, self._trial_peak_bytes = self._trial_peak_bytes, 0
        return peak_bytes


class VirtualGauges(Gauges):
    """Gauges of a virtual machine: exact, and the same on every machine that runs it."""

    clock = "virtual"

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self._machine = machine
        self._device = machine.device
        self._tracker = machine.tracker
        self._peak_with_absent = 0
        self.resume()

    def pause(self) -> None:
        """Does nothing: the next gauges that resume count in place of these."""

    def resume(self) -> None:
        self._tracker.on_growth = self._grown  # of one at a time: the machine runs on one thread

    def _grown(self, live_bytes: int) -> None:
        self._peak_with_absent = max(self._peak_with_absent, live_bytes + self.absent_bytes)

    def mark(self, stream: _C.Stream) -> Mark:
        aside_ns = self._machine.aside_ns
        return self._device.now_ns(stream) if aside_ns is None else aside_ns

    def issued_ns(self) -> int:
        return self._machine.issued_ns

    def fall_behind(self, stream: _C.Stream) -> bool:
        """Does nothing: virtual time is that of the device alone."""
        return False

    def ns_between(self, begin: Mark, end: Mark) -> int:
        return int(end - begin)

    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        return int(self._device.event_ns(event) - begin)

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        tracker = self._tracker
        peak_bytes, tracker.peak_bytes = tracker.peak_bytes, tracker.live_bytes
        self._machine.aside_ns = 0
        try:
            with super().unnoticed():
                yield
        finally:
            self._machine.aside_ns = None
            if not self._machine.fake:
                self._trial_peak_bytes = max(self._trial_peak_bytes, tracker.peak_bytes)
                peak_bytes = max(peak_bytes, tracker.peak_bytes)
            tracker.peak_bytes = peak_bytes

    def allocated_bytes(self) -> int:
        return self._tracker.live_bytes

    def take_peaks(self) -> Peaks:
        live = self._tracker.live_bytes
        with_absent = max(self._peak_with_absent, live + self.absent_bytes)
        self._peak_with_absent = live + self.absent_bytes
        return Peaks(self._tracker.take_peak_bytes(), with_absent, live)


class CudaGauges(Gauges):
    """Gauges of a GPU: timed events, and torch's memory statistics.

    The statistics have one peak, since the user's last reset. If that peak rose between two hooks, it is the peak
    between them. Otherwise the peak is known if the interval's allocations and frees are: see interval_peaks.py. For
    all others there are two upper bounds: the unchanged peak, and the bytes allocated at the first hook plus all
    allocations since. The lower bound of the two is used.
    """

    clock = "device"
    reads_ends = False

    def __init__(self, torch_device: torch.device, device: _C.Device) -> None:
        super().__init__()
        self._device = device
        self._torch_device = torch_device
        self._lag = DeviceLag(torch_device, device)
        self._intervals = IntervalPeaks(torch_device)
        self._last = self._read()

    def resume(self) -> None:
        """Does nothing: torch counts all the time."""

    def _read(self) -> Reading:
        statistics: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._torch_device)
        requested, blocks = statistics["requested_bytes"]["all"], statistics["active"]["all"]
        sizes = requested["current"], requested["allocated"], requested["peak"]
        return Reading(*sizes, blocks["allocated"], blocks["freed"])

    def step_begins(self) -> None:
        self._intervals.step_begins(self._read)
        self._last = self._read()
        self.peak_before_bytes = self._last.peak_bytes

    def hook_ends(self, *, has_changed: bool) -> Peaks:
        if has_changed or self._is_unread:
            return self.take_peaks()
        now = self._last.bytes
        return Peaks(now, now + self.absent_bytes, now)

    def allocated_in_hook(self, *, has_changed: bool) -> int:
        return self.allocated_bytes() if has_changed or self._is_unread else self._last.bytes

    def step_ended(self) -> Peaks:
        peaks = self.take_peaks()
        self._intervals.step_ended(lambda: self._last)
        return peaks

    def pause(self) -> None:
        self._intervals.step_ended(self._read)

    def mark(self, stream: _C.Stream) -> Mark:
        return self._device.record(stream, timing=True)

    def fall_behind(self, stream: _C.Stream) -> bool:
        return self._lag.extend(stream)

    def host_waits(self) -> contextlib.AbstractContextManager[None]:
        return self._lag.host_waits()

    def ns_between(self, begin: Mark, end: Mark) -> int:
        return self._device.elapsed_ns(begin, end)

    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        return self._device.elapsed_ns(begin, event)

    def allocated_bytes(self) -> int:
        return self._read().bytes

    def take_peaks(self) -> Peaks:
        before, now = self._last, self._read()
        self._last = now
        known = self._intervals.peak_bytes(before, now)
        if now.peak_bytes > before.peak_bytes:
            highest = now.peak_bytes
        elif known is not None:
            highest = known
        else:
            highest = min(before.bytes + now.allocated_bytes - before.allocated_bytes, now.peak_bytes)
        highest = max(highest, now.bytes, before.bytes)
        if self._is_unnoticed:
            self._trial_peak_bytes = max(self._trial_peak_bytes, highest)
        return Peaks(highest, highest + self.absent_bytes, now.bytes)
