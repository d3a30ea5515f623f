"""The time and memory that a step took: its Timeline, its Recording, and how it kept to the budget.

While the step runs, the meter only records marks. They are converted to times when the timeline is read, because that
may wait until the device has passed the end of the step. Timelines and recordings may be read on any thread; two at one
time compute the same.

[Note: Stalls and host-bound gaps] The time between two marks of a hook is not all stall: if the device is ahead of the
host, the second mark is reached when the host issues it. The compute stream waits for the end of a copy. So a stall
lasts from the first mark to the last end of a copy before the second, and there is none if no copy ended.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from vdnn import _C
from vdnn.bytesize import format_bytes
from vdnn.runtime.machine.gauges import Gauges, Mark, Peaks
from vdnn.runtime.steps.recorder import Recorder
from vdnn.runtime.storage.transport import Transport
from vdnn.step.recording import Recording
from vdnn.step.timeline import Copy, Timeline, Track
from vdnn.step.timeline import Mark as TimelineMark

logger = logging.getLogger("vdnn")
_CLOCK_NS = 1000  # how exact the times of a device's events are

Ends = Mapping[Track, Sequence[int]]  # when the copies of each track ended, in order


class _Hook(NamedTuple):
    point: int
    begin: Mark
    reload_marks: tuple[Mark, Mark] | None
    end: Mark
    allocated_bytes: int
    peak_bytes: int


_FIELDS = len(_Hook._fields)


class Meter:
    """Measures one step on one device."""

    def __init__(self, gauges: Gauges, begin: Mark, resident_bytes: int) -> None:
        """`resident_bytes` were allocated when the step began."""
        self._gauges = gauges
        self._begin = begin
        self.resident_bytes = resident_bytes + gauges.absent_bytes
        self._end: tuple[Mark, Mark] = (begin, begin)
        self._last: tuple[int, int] = (0, 0)
        self._log: list[Any] = []  # the fields of each _Hook: see [Note: The log] in recorder.py
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
        """Called when a hook is over, with the bytes that are allocated then. `point` is the last point of the step so
        far.
        `reload_marks`: before and after its use waited for a reload."""
        self._log += max(point, 0), begin, reload_marks, end, allocated_bytes, peak_bytes

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
        peaks: list[int] = self._log[_FIELDS - 1 :: _FIELDS]
        return max([self._last[1], *peaks])

    def timeline(self) -> Timeline:
        """May block until the device has passed the step's end."""
        gauges, begin = self._gauges, self._begin
        copies = tuple(
            Copy(track, lifetime, nbytes, gauges.ns_until(begin, span[0]), gauges.ns_until(begin, span[1]))
            for track, lifetime, nbytes, span in self._copies
        )
        ends = {track: sorted(copy.end_ns for copy in copies if copy.track is track) for track in Track}
        log = self._log
        marks = [self._mark_of(_Hook(*log[at : at + _FIELDS]), ends) for at in range(0, len(log), _FIELDS)]
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


class MeasuredStep:
    """A finished step of one device. It has no recording or no timeline if it had no recorder or no meter."""

    def __init__(self, recorder: Recorder | None, meter: Meter | None, transport: Transport) -> None:
        self._recorder = recorder
        self._meter = meter
        info = transport.device.info
        self._device = transport.torch_device.type, info.name, info.total_bytes

    @functools.cached_property
    def recording(self) -> Recording | None:
        return None if self._recorder is None else self._recorder.recording(*self._device)

    def add_recomputes(self, recording: Recording) -> None:
        """`recording` is this step's, with recomputes that are known from other steps: one that followed a plan has
        looked for none."""
        self.recording = recording

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        return None if self._meter is None else self._meter.timeline()


class MeasuredSteps:
    """The last recorded and the last measured step of one session."""

    def __init__(self) -> None:
        self.last_recorded: MeasuredStep | None = None
        self._last_measured: MeasuredStep | None = None

    @property
    def recording(self) -> Recording | None:
        return None if self.last_recorded is None else self.last_recorded.recording

    @property
    def timeline(self) -> Timeline | None:
        return None if self._last_measured is None else self._last_measured.timeline

    def finish(
        self,
        recorder: Recorder | None,
        meter: Meter | None,
        transport: Transport,
        ends: tuple[Mark, Mark],
        peaks: Peaks,
    ) -> MeasuredStep:
        """Ends a step. Its last computation is over at the first of `ends`; copies of freed graphs have released their
        memory at the second."""
        measured = MeasuredStep(recorder, meter, transport)
        if meter is not None:
            meter.finish(*ends, peaks.peak_bytes)
            self._last_measured = measured
        if recorder is not None:
            recorder.finish(ends[0], peaks.with_absent_bytes, has_data=not transport.fake)
            self.last_recorded = measured
        return measured


# The budget. A step's peak is that between its first hook and its end.


class Over(Enum):
    """Why a step took more than its budget."""

    NO_PLAN = "ran before there was a plan for it"
    ANOTHER_PLAN = "followed the plan of another kind of step"
    DIFFERED = "differed from its plan"
    MORE_THAN_PLANNED = "took more than its plan says"
    TOO_LARGE = "needs more than the budget even with everything offloaded"
    PASSED_THROUGH = "saved only tensors that pass through, such as those of unknown subclasses, which no session moves"
    EARLIER_GRAPHS = "began with graphs of earlier steps that are still held and cannot be offloaded"


class BudgetLedger:
    """The steps of one session that have a budget and a count of memory: those that kept to it, and those that did
    not, with the causes. The first step over the budget for each cause is logged; the report has all of them."""

    def __init__(self) -> None:
        self.steps = 0
        self.budget_bytes = 0  # of the last step
        self.worst_bytes = 0
        self.over: Counter[Over] = Counter()
        self._worst: tuple[int, int, Over] | None = None  # of the running step

    def micro_batch_ended(self, peak_bytes: int, budget_bytes: int, cause: Over) -> None:
        """Note a part of the running step, or all of it. `cause` is why it exceeded its budget, if it did."""
        if self._worst is None or peak_bytes > self._worst[0]:
            self._worst = peak_bytes, budget_bytes, cause

    def step_ended(self) -> None:
        """Note a finished step, if it had a budget."""
        if self._worst is None:
            return
        (peak_bytes, budget_bytes, cause), self._worst = self._worst, None
        self.steps += 1
        self.budget_bytes = budget_bytes
        if peak_bytes <= budget_bytes:
            return
        self.worst_bytes = max(self.worst_bytes, peak_bytes)
        self.over[cause] += 1
        if self.over[cause] == 1:
            logger.warning(
                "vdnn: a step took %s, %s more than its budget: it %s. session.report() counts such steps.",
                format_bytes(peak_bytes),
                format_bytes(peak_bytes - budget_bytes),
                cause.value,
            )

    def lines(self) -> list[str]:
        """For the report; nothing before the first step."""
        if not self.steps:
            return []
        budget, over = format_bytes(self.budget_bytes), self.over.total()
        if not over:
            return [f"  budget {budget}: all of {self.steps} steps within"]
        causes = "; ".join(f"{count} {cause.value}" for cause, count in self.over.most_common())
        return [
            f"  budget {budget}: {self.steps - over} of {self.steps} steps within, {over} over, worst "
            f"{format_bytes(self.worst_bytes)} ({causes})"
        ]
