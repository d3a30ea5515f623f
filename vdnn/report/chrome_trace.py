"""Writes steps as a trace for chrome://tracing and ui.perfetto.dev: spans of compute, stalls, copies, allocated bytes.

Each timeline of each step is a process of its own. Its rows are the compute stream, with stalls as slices between the
spans of compute, and one row for each copy engine. Slices of one row may not overlap, so copies that were measured as
overlapping get a further row. Times are microseconds with three decimals, which are nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from vdnn.planning.recomputing import recording_under
from vdnn.report.run_folder import Run
from vdnn.report.step_timeline import spoken_source
from vdnn.report.storage_table import operation_name, storage_name
from vdnn.step.json_form import save_text
from vdnn.step.recording import Point, PointKind, Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Copy, Mark, Timeline, Track

COMPUTE_ROW = 1
RELOAD_STALL, RELEASE_STALL = "stall: waits for a reload", "stall: waits for an offload"
HOST_STALL = "stall: waits for the host"
COUNTER = "allocated bytes"

Event = dict[str, Any]


def write_trace(run: Run, path: str | os.PathLike[str]) -> int:
    """Write the trace of all steps that have a timeline. Returns the number of timelines."""
    trace = trace_of(run.steps)
    save_text(json.dumps(trace, separators=(",", ":")), path)
    return len({event["pid"] for event in trace["traceEvents"]})


def trace_of(steps: Sequence[SavedStep]) -> dict[str, Any]:
    """The trace as the object that write_trace saves as JSON. Each timeline of a step is a process of the trace."""
    events: list[Event] = []
    process = 0
    for step in steps:
        for timeline in (step.predicted, step.measured):
            if timeline is not None:
                process += 1
                events += _Process(process, step, timeline).events()
    return {"displayTimeUnit": "ms", "traceEvents": events}


class _Process:
    """One timeline of one step."""

    def __init__(self, process: int, step: SavedStep, timeline: Timeline) -> None:
        self._process = process
        self._step = step
        self._timeline = timeline
        self._followed = _followed(step)
        self._points = _points_of(step, self._followed)

    def events(self) -> Iterator[Event]:
        timeline = self._timeline
        said = spoken_source(timeline)
        name = f"{self._step.name}: {said if timeline.clock in said else f'{said} ({timeline.clock} time)'}"
        yield self._named("process_name", name, 0)
        yield self._named("thread_name", "compute", COMPUTE_ROW)
        yield from self._computing()
        row = COMPUTE_ROW
        for track in Track:
            for number, copies in enumerate(_rows_of([one for one in timeline.copies if one.track is track])):
                row += 1
                yield self._named("thread_name", track.value if not number else f"{track.value} ({number + 1})", row)
                yield from (self._copy(copy, row) for copy in copies)
        yield from self._bytes()

    def _computing(self) -> Iterator[Event]:
        now = 0
        before: Mark | None = None
        for mark in self._timeline.marks:
            issued_ns = max(now, mark.begin_ns - mark.host_stall_ns)
            if issued_ns > now:
                yield self._slice(COMPUTE_ROW, self._computed(before, mark), now, issued_ns, self._about(mark))
            if mark.begin_ns > issued_ns:
                yield self._slice(COMPUTE_ROW, HOST_STALL, issued_ns, mark.begin_ns, self._about(mark))
            # At a mark the stall for a reload is drawn first, then the stalls for releases.
            between = mark.begin_ns + mark.reload_stall_ns
            if mark.reload_stall_ns:
                yield self._slice(COMPUTE_ROW, RELOAD_STALL, mark.begin_ns, between, self._about(mark))
            end = between + mark.release_stall_ns
            if mark.release_stall_ns:
                yield self._slice(COMPUTE_ROW, RELEASE_STALL, between, end, self._about(mark))
            now, before = max(mark.end_ns, end), mark
        if self._timeline.step_ns > now:
            yield self._slice(COMPUTE_ROW, "to the end of the step", now, self._timeline.step_ns, {})

    def _computed(self, before: Mark | None, mark: Mark) -> str:
        """The name of the compute before this point: the producer of a save, or the operation of the use before."""
        point = self._point(mark)
        if point is not None and point.key is not None:
            producer = operation_name(point.key.producer) or "leaf"
            return f"{producer} in {point.key.module}" if point.key.module else producer
        last = None if before is None else self._point(before)
        if last is not None and last.kind is PointKind.USE and last.lifetime is not None:
            return f"{last.operation or 'backward'} with {self._storage(last.lifetime)}"
        return "to the first use" if point is not None and point.kind is PointKind.USE else "compute"

    def _about(self, mark: Mark) -> dict[str, Any]:
        """The arguments of a slice: the point at its end, and the storage of that point."""
        point = self._point(mark)
        about: dict[str, Any] = {"point": mark.point}
        if point is not None:
            about["at"] = point.kind.value
            if point.lifetime is not None:
                about |= {"storage": point.lifetime, "saved as": self._storage(point.lifetime)}
        return about

    def _point(self, mark: Mark) -> Point | None:
        return self._points[mark.point] if mark.point < len(self._points) else None

    def _storage(self, lifetime: int) -> str:
        if self._followed is None or lifetime >= len(self._followed.lifetimes):
            return f"storage {lifetime}"
        return storage_name(self._followed, lifetime)

    def _copy(self, copy: Copy, row: int) -> Event:
        word = "offload" if copy.track is Track.TO_HOST else "reload"
        about = {"storage": copy.lifetime, "bytes": copy.nbytes}
        return self._slice(row, f"{word} {self._storage(copy.lifetime)}", copy.begin_ns, copy.end_ns, about)

    def _bytes(self) -> Iterator[Event]:
        """The counter of allocated bytes: the peak of each interval at its start, and the bytes at its end."""
        now = 0
        for mark in self._timeline.marks:
            yield self._counted(now, mark.peak_bytes)
            yield self._counted(mark.end_ns, mark.allocated_bytes)
            now = mark.end_ns

    def _counted(self, time_ns: int, count: int) -> Event:
        return {
            "ph": "C",
            "name": COUNTER,
            "pid": self._process,
            "tid": 0,
            "ts": time_ns / 1000,
            "args": {"bytes": count},
        }

    def _slice(self, row: int, name: str, begin_ns: int, end_ns: int, about: dict[str, Any]) -> Event:
        return {
            "ph": "X",
            "name": name,
            "pid": self._process,
            "tid": row,
            "ts": begin_ns / 1000,
            "dur": (end_ns - begin_ns) / 1000,
            "args": about,
        }

    def _named(self, what: str, name: str, row: int) -> Event:
        return {"ph": "M", "name": what, "pid": self._process, "tid": row, "ts": 0, "args": {"name": name}}


def _followed(step: SavedStep) -> Recording | None:
    """The recording that the timelines' points refer to: the step with the plan's recomputes."""
    if step.recording is None or step.plan is None:
        return step.recording
    return recording_under(step.recording, step.plan.lifetimes)


def _points_of(step: SavedStep, followed: Recording | None) -> tuple[Point, ...]:
    if followed is not None:
        return followed.points
    points = () if step.plan is None else step.plan.points
    return tuple(Point(point.kind, point.lifetime, point.key, 0, 0, 0) for point in points)


def _rows_of(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Distribute copies over as few rows as possible without overlap. One row if there are no copies."""
    rows: list[list[Copy]] = [[]]
    for copy in sorted(copies, key=lambda one: (one.begin_ns, one.end_ns)):
        row = next((row for row in rows if not row or row[-1].end_ns <= copy.begin_ns), None)
        if row is None:
            rows.append([copy])
        else:
            row.append(copy)
    return rows
