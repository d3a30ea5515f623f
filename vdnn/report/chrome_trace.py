"""A step as a trace for chrome://tracing and ui.perfetto.dev: spans of computing, stalls, copies, and allocated bytes.

Every timeline of every step is a process of its own. Its rows are the compute stream, on which stalls are slices of
their kind between the spans of computing, and one row for each copy engine; copies that were measured as overlapping
get a further row, for slices of one row never do. Times are microseconds, with nanoseconds behind the point.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from vdnn.planning.recomputing import recording_under
from vdnn.report.run_folder import Run
from vdnn.report.storage_table import operation_name, storage_name
from vdnn.step.json_form import save_text
from vdnn.step.recording import Point, PointKind, Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Copy, Mark, Timeline, Track

COMPUTE_ROW = 1
RELOAD_STALL, RELEASE_STALL = "waits for a copy back", "waits for a copy out"
COUNTER = "allocated bytes"

Event = dict[str, Any]


def write_trace(run: Run, path: str | os.PathLike[str]) -> int:
    """Of all steps that have a timeline; returns how many timelines there are."""
    trace = trace_of(run.steps)
    save_text(json.dumps(trace, separators=(",", ":")), path)
    return len({event["pid"] for event in trace["traceEvents"]})


def trace_of(steps: Sequence[SavedStep]) -> dict[str, Any]:
    """The trace as the object that write_trace saves as JSON: each timeline of a step is a process of it."""
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
        name = f"{self._step.name}: {timeline.source} ({timeline.clock} time)"
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
            if mark.begin_ns > now:
                yield self._slice(COMPUTE_ROW, self._computed(before, mark), now, mark.begin_ns, self._about(mark))
            # Within a mark the wait at a use comes first, then the waits of what is given up there.
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
        """What ran up to this point: at a save what made it, after a use the operation that asked for it."""
        here = self._point(mark)
        if here is not None and here.key is not None:
            made = operation_name(here.key.producer) or "leaf"
            return f"{made} in {here.key.module}" if here.key.module else made
        last = None if before is None else self._point(before)
        if last is not None and last.kind is PointKind.USE and last.lifetime is not None:
            return f"{last.operation or 'backward'} with {self._storage(last.lifetime)}"
        return "to the first use" if here is not None and here.kind is PointKind.USE else "computing"

    def _about(self, mark: Mark) -> dict[str, Any]:
        """The point that ends it."""
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
        """The highest of each stretch from where it begins, and what is left at its end."""
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
    """What its timelines are numbered by: the step with the plan's rebuilds."""
    if step.recording is None or step.plan is None:
        return step.recording
    return recording_under(step.recording, step.plan.lifetimes)


def _points_of(step: SavedStep, followed: Recording | None) -> tuple[Point, ...]:
    if followed is not None:
        return followed.points
    points = () if step.plan is None else step.plan.points
    return tuple(Point(point.kind, point.lifetime, point.key, 0, 0, 0) for point in points)


def _rows_of(copies: Sequence[Copy]) -> list[list[Copy]]:
    """As few rows as hold them without overlap; one, even if there are none."""
    rows: list[list[Copy]] = [[]]
    for copy in sorted(copies, key=lambda one: (one.begin_ns, one.end_ns)):
        row = next((row for row in rows if not row or row[-1].end_ns <= copy.begin_ns), None)
        if row is None:
            rows.append([copy])
        else:
            row.append(copy)
    return rows
