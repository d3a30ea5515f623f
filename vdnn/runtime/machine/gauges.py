"""The clock of a device and the count of its allocated memory, which the hooks of a watched step read.

A mark is a point on a stream. Its time is read later, when the device has passed it, so that no hook waits. Memory is
in requested bytes. Gauges never reset the memory statistics of torch, which belong to the user.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.torch_internals import allocator_history

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
    is_behind_host = False  # the device computes what the host has issued before

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
        """The peak of trials since the last call; 0 if there were none. Without data a trial takes other memory than it
        would."""
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
        before, with_absent = tracker.take_peak_bytes(), self._peak_with_absent  # of the interval around the trial
        self._machine.aside_ns = 0
        tracker.replays = False  # steps are planned as they are when all trials are over
        try:
            with super().unnoticed():
                yield
        finally:
            self._machine.aside_ns = None
            tracker.replays = True
            tracker.had_peak(before)
            self._peak_with_absent = max(self._peak_with_absent, with_absent)
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
    between them. Otherwise the peak is known if the interval's allocations and frees are: see IntervalPeaks. For
    all others there are two upper bounds: the unchanged peak, and the bytes allocated at the first hook plus all
    allocations since. The lower bound of the two is used.
    """

    clock = "device"
    reads_ends = False
    is_behind_host = True

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


# Keeps a GPU behind the host while a step is recorded, so that recorded times are those of the GPU.
#
# The hooks of a recorded step cost the host more than most operations cost the GPU. Without a lag the GPU waits for the
# host in every interval, and the times between marks are the host's: on an H200 a step of 60 to 68 ms was recorded with
# 99 to 140 ms, and plans hid copies behind compute that is not there. So a kernel that waits is put between two
# intervals. It runs while the host issues the next one, and costs hardly any time that the host does not need anyway.
#
# [Note: Time that the host waits] A trial of a recipe waits for the device, and so for the lag itself. If that time
# counted as the host's, the next lag would be twice as long, and the one behind it four times.

# The device is at most this many hooks behind the host: the driver's queue is short, and each wait costs time.
_HOOKS_BEHIND = 2
# A hook and the operations behind it may take longer than those before them.
_MARGIN = 2.0
_SHORTEST_NS, _LONGEST_NS = 50_000, 20_000_000
# The rate that is assumed for a GPU whose clock torch does not report. It is low: a longer wait costs time, a shorter
# one accuracy.
_CLOCK_KHZ = 1_500_000

# Spins for a number of cycles on the current stream; absent if torch has no CUDA.
_spin: Callable[[int], None] | None = getattr(torch._C, "_cuda_sleep", None)


class DeviceLag:
    """The lag of one device behind the host."""

    def __init__(self, torch_device: torch.device, device: _C.Device) -> None:
        self._torch_device = torch_device
        self._device = device
        self._reached: deque[_C.Event] = deque(maxlen=_HOOKS_BEHIND)
        self._last_ns = 0
        self._waited_ns = 0  # since then
        self._cycles_per_ns = 0.0  # 0: not asked yet

    def extend(self, stream: _C.Stream) -> bool:
        """Called between two intervals, on the stream that computes: lets it wait for about as long as the host needs
        until the next call, unless it is far enough behind. True if it will wait."""
        now_ns = time.perf_counter_ns()
        took_ns, self._last_ns, self._waited_ns = now_ns - self._last_ns - self._waited_ns, now_ns, 0
        is_behind = len(self._reached) == _HOOKS_BEHIND and not self._device.query(self._reached[0])
        self._reached.append(self._device.record(stream))
        if _spin is None or is_behind:
            return False
        wait_ns = min(max(_MARGIN * took_ns, _SHORTEST_NS), _LONGEST_NS)
        with torch.cuda.device(self._torch_device):
            _spin(round(wait_ns * self._clock()))
        return True

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[None]:
        """A context in which the host waits for the device. See [Note: Time that the host waits]."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._waited_ns += time.perf_counter_ns() - begin_ns

    def _clock(self) -> float:
        """Cycles in a nanosecond."""
        if not self._cycles_per_ns:
            properties = torch.cuda.get_device_properties(self._torch_device)
            self._cycles_per_ns = getattr(properties, "clock_rate", _CLOCK_KHZ) / 1e6
        return self._cycles_per_ns


# The exact peaks of allocated bytes between two readings of torch's statistics, learned from the allocator's history.
#
# The statistics have one peak, since the user's last reset, and it is not ours to reset. If it did not rise in an
# interval, they bound the interval's peak only by all that was allocated in it: both workspaces of a convolution's
# backward count, though the first is freed before the second is allocated. The allocator's history has every allocation
# and every free in order. So one step is recorded with it, and for each interval the rise from its start to its peak is
# noted. A later interval with the same allocations and frees, in number and in bytes, has the same rise.
#
# [Note: Steps with a history] The first step has one, and a later step if intervals in the step before were unknown, up
# to a few times. Nothing is recorded while the user records a history, and nothing is learned unless the history agrees
# with the statistics at every reading.

_MOST_EVENTS = 1 << 17
_MOST_STEPS = 4
_MOST_KNOWN = 1 << 16


class Reading(NamedTuple):
    """The statistics at one moment, in requested bytes. Totals are since the process began."""

    bytes: int
    allocated_bytes: int
    peak_bytes: int
    allocations: int
    frees: int

    @property
    def events(self) -> int:
        return self.allocations + self.frees


class _Signature(NamedTuple):
    """The allocations and frees of an interval."""

    allocations: int
    frees: int
    allocated_bytes: int
    change_bytes: int


def _signature(before: Reading, now: Reading) -> _Signature:
    return _Signature(
        now.allocations - before.allocations,
        now.frees - before.frees,
        now.allocated_bytes - before.allocated_bytes,
        now.bytes - before.bytes,
    )


class IntervalPeaks:
    """The peaks of one device's intervals. Used under the lock of the hooks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rises: dict[_Signature, int] = {}
        self._steps_left = _MOST_STEPS
        self._has_unknown = True
        self._first: Reading | None = None  # where the history began
        self._intervals: list[tuple[Reading, Reading]] = []  # since then

    def peak_bytes(self, before: Reading, now: Reading) -> int | None:
        """The exact peak of the interval, or None if it is not known."""
        if self._first is not None:
            self._intervals.append((before, now))
        if now.frees == before.frees:
            return now.bytes
        if now.allocations == before.allocations:
            return before.bytes
        rise = self._rises.get(_signature(before, now))
        if rise is None:
            self._has_unknown = self._has_unknown or self._first is None
            return None
        return before.bytes + rise

    def step_begins(self, read: Callable[[], Reading]) -> None:
        """Starts a history if this step needs one. See [Note: Steps with a history]."""
        if self._first is not None or not self._has_unknown or not self._steps_left or allocator_history.is_recorded():
            return
        self._steps_left -= 1
        self._has_unknown = False
        allocator_history.start(_MOST_EVENTS)
        self._first = read()

    def step_ended(self, read: Callable[[], Reading]) -> None:
        """Learns from the history, if there is one, and stops it."""
        first, intervals = self._first, self._intervals
        if first is None:
            return
        self._first, self._intervals = None, []
        now = read()
        try:
            changes = allocator_history.changes(self._device)
        finally:
            allocator_history.stop()
        is_whole = len(changes) == now.events - first.events
        allocated = list(accumulate(changes, initial=first.bytes))
        self._has_unknown = not (is_whole and self._learn(first, intervals, allocated))

    def _learn(self, first: Reading, intervals: list[tuple[Reading, Reading]], allocated: list[int]) -> bool:
        """`allocated` are the bytes after each event since `first`. False if they do not agree with the readings."""
        rises: dict[_Signature, int] = {}
        for before, now in intervals:
            begin, end = before.events - first.events, now.events - first.events
            if not 0 <= begin <= end < len(allocated) or (allocated[begin], allocated[end]) != (
                before.bytes,
                now.bytes,
            ):
                return False  # the totals were reset, or an event came between a reading and the history's ends
            signature = _signature(before, now)
            rises[signature] = max(rises.get(signature, 0), max(allocated[begin : end + 1]) - before.bytes)
        if len(self._rises) + len(rises) > _MOST_KNOWN:
            self._rises.clear()
        for signature, rise in rises.items():
            self._rises[signature] = max(self._rises.get(signature, 0), rise)
        return True
