"""Measures the Timeline of a step: when the compute stream waited and for what, and when each copy ran.

While the step runs, the meter only records marks. They are converted to times when the timeline is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges, Mark
from vdnn.step.timeline import Copy, Timeline, Track
from vdnn.step.timeline import Mark as TimelineMark


@dataclass(frozen=True, slots=True)
class _Hook:
    point: int
    begin: Mark
    reload_begin: Mark | None
    reload_end: Mark | None
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
        self._hooks: list[_Hook] = []
        self._copies: list[tuple[Track, int, int, tuple[_C.Event, _C.Event]]] = []

    def hook(self, point: int, marks: tuple[Mark, Mark | None, Mark | None, Mark], peak_bytes: int) -> None:
        """A hook is over. `point` is the last point of the step so far."""
        self._hooks.append(_Hook(point, *marks, self._gauges.allocated_bytes(), peak_bytes))

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
        return max([self._last[1], *(hook.peak_bytes for hook in self._hooks)])

    def timeline(self) -> Timeline:
        """May block until the device has passed the step's end."""
        gauges, begin = self._gauges, self._begin
        marks = [self._mark_of(hook) for hook in self._hooks]
        computed_ns, step_ns = (gauges.ns_between(begin, mark) for mark in self._end)
        end_point = marks[-1].point + 1 if marks else 0
        marks.append(TimelineMark(end_point, computed_ns, step_ns, step_ns - computed_ns, 0, *self._last))
        copies = tuple(
            Copy(track, lifetime, nbytes, gauges.ns_until(begin, span[0]), gauges.ns_until(begin, span[1]))
            for track, lifetime, nbytes, span in self._copies
        )
        return Timeline("measured", gauges.clock, step_ns, tuple(marks), copies)

    def _mark_of(self, hook: _Hook) -> TimelineMark:
        gauges, begin = self._gauges, self._begin
        stalled_ns = gauges.ns_between(hook.begin, hook.end)
        reload_ns = 0
        if hook.reload_begin is not None:
            reload_ns = gauges.ns_between(hook.reload_begin, hook.reload_end)
        return TimelineMark(
            point=hook.point,
            begin_ns=gauges.ns_between(begin, hook.begin),
            end_ns=gauges.ns_between(begin, hook.end),
            release_stall_ns=stalled_ns - reload_ns,
            reload_stall_ns=reload_ns,
            allocated_bytes=hook.allocated_bytes,
            peak_bytes=hook.peak_bytes,
        )
