"""Measures the Timeline of a step: when the compute stream waited and for what, and when each copy ran.

While the step runs, the meter only records marks. They are converted to times when the timeline is read.

[Note: Stalls and host-bound gaps] The time between two marks of a hook is not all stall: if the device is ahead of the
host, the second mark is reached when the host issues it. What the compute stream waits for is the end of a copy. So a
stall lasts from the first mark to the last end of a copy before the second, and there is none if no copy ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges, Mark
from vdnn.step.timeline import Copy, Timeline, Track
from vdnn.step.timeline import Mark as TimelineMark

_CLOCK_NS = 1000  # how exact the times of a device's events are

Ends = Mapping[Track, Sequence[int]]  # when the copies of each track ended, in order


class _Hook(NamedTuple):
    point: int
    begin: Mark
    reload_marks: tuple[Mark, Mark] | None
    end: Mark
    allocated_bytes: int
    peak_bytes: int


class Meter:
    """Measures one step on one device."""

    def __init__(self, gauges: Gauges, begin: Mark, resident_bytes: int) -> None:
        """`resident_bytes` were allocated when the step began."""
        self._gauges = gauges
        self._begin = begin
        self.resident_bytes = resident_bytes + gauges.absent_bytes
        self._end: tuple[Mark, Mark] = (begin, begin)
        self._last: tuple[int, int] = (0, 0)
        self._hooks: list[tuple[int, Mark, tuple[Mark, Mark] | None, Mark, int, int]] = []  # of a _Hook
        self._copies: list[tuple[Track, int, int, tuple[_C.Event, _C.Event]]] = []

    def hook(
        self,
        point: int,
        begin: Mark,
        reload_marks: tuple[Mark, Mark] | None,
        end: Mark,
        allocated_bytes: int,
        peak_bytes: int,
    ) -> None:
        """A hook is over, and so many bytes are allocated. `point` is the last point of the step so far.
        `reload_marks`: before and after its use waited for a reload."""
        self._hooks.append((max(point, 0), begin, reload_marks, end, allocated_bytes, peak_bytes))

    def copied(self, track: Track, lifetime: int, nbytes: int, span: tuple[_C.Event, _C.Event]) -> None:
        self._copies.append((track, lifetime, nbytes, span))

    def finish(self, begin: Mark, end: Mark, peak_bytes: int) -> None:
        """End the step. Its last computation is over at `begin`; copies of freed graphs have released their memory at
        `end`."""
        self._end = (begin, end)
        self._last = self._gauges.allocated_bytes(), peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak so far. Does not wait for the device."""
        return max([self._last[1], *(peak_bytes for *_, peak_bytes in self._hooks)])

    def timeline(self) -> Timeline:
        """May block until the device has passed the step's end."""
        gauges, begin = self._gauges, self._begin
        copies = tuple(
            Copy(track, lifetime, nbytes, gauges.ns_until(begin, span[0]), gauges.ns_until(begin, span[1]))
            for track, lifetime, nbytes, span in self._copies
        )
        ends = {track: sorted(copy.end_ns for copy in copies if copy.track is track) for track in Track}
        marks = [self._mark_of(_Hook(*hook), ends) for hook in self._hooks]
        computed_ns, step_ns = (gauges.ns_between(begin, mark) for mark in self._end)
        end_point = marks[-1].point + 1 if marks else 0
        released_ns = _stall_ns(ends[Track.TO_HOST], computed_ns, step_ns)
        marks.append(TimelineMark(end_point, computed_ns, step_ns, released_ns, 0, *self._last))
        return Timeline("measured", gauges.clock, step_ns, tuple(marks), copies)

    def _mark_of(self, hook: _Hook, ends: Ends) -> TimelineMark:
        begin_ns, end_ns = (self._gauges.ns_between(self._begin, mark) for mark in (hook.begin, hook.end))
        release_ns = reload_ns = 0
        before_ns = begin_ns
        if hook.reload_marks is not None:
            reloads = (self._gauges.ns_between(self._begin, mark) for mark in hook.reload_marks)
            reload_begin_ns, reload_end_ns = reloads
            release_ns = _stall_ns(ends[Track.TO_HOST], begin_ns, reload_begin_ns)
            reload_ns = _stall_ns(ends[Track.TO_DEVICE], reload_begin_ns, reload_end_ns)
            before_ns = reload_end_ns
        release_ns += _stall_ns(ends[Track.TO_HOST], before_ns, end_ns)
        sizes = hook.allocated_bytes, hook.peak_bytes
        return TimelineMark(hook.point, begin_ns, end_ns, release_ns, reload_ns, *sizes)


def _stall_ns(ends: Sequence[int], begin_ns: int, end_ns: int) -> int:
    """See [Note: Stalls and host-bound gaps]."""
    before = bisect_right(ends, end_ns + _CLOCK_NS)
    return max(0, min(ends[before - 1], end_ns) - begin_ns) if before else 0
