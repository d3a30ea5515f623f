"""Draws the timeline of one step: when the compute stream and both copy engines were busy, and every stall.

If a step was both predicted and run and the two differ, both are drawn, one above the other, on one axis of time.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vdnn.bytesize import format_bytes
from vdnn.report.drawing import FONT_POINTS, Picture, Shape, set_title, time_label
from vdnn.report.file_names import file_name
from vdnn.report.palette import (
    BLUE,
    GRID,
    HOST_STALL,
    MUTED,
    RELEASE_STALL,
    RELOAD_STALL,
    REST,
    REST_SPIKES,
    SURFACE,
    Shade,
)
from vdnn.step.recording import PointKind
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline, Track

_COLUMNS = {"wide": 900, "narrow": 320}
_EDGED = 120  # copies on one engine: with more, edges would hide the copies
_LEAST_STALL = 0.0015  # of the step: a shorter stall is drawn at this length, so that it is visible

Span = tuple[int, int]  # begin and end, in ns


class _Row(NamedTuple):
    """Spans of one colour, in a row of the picture."""

    name: str
    spans: list[Span]
    shade: Shade
    hatch: str = ""


def timeline_picture(step: SavedStep, workload: str, title: str) -> Picture:
    """The picture of a step, which must have a timeline."""
    shown = shown_timelines(step)
    return Picture(
        name=f"timeline-{file_name(step.name)}",
        title="Timeline of one step",
        described=f"One step of {title}: the compute stream with its stalls, and copies in both directions.",
        workload=workload,
        draw=lambda figure, shape: _draw(figure, shape, step, title),
        height=lambda shape: (2.7 if not shape.is_narrow else 3.5) + 1.6 * (len(shown) - 1),
    )


def shown_timelines(step: SavedStep) -> list[Timeline]:
    measured, predicted = step.measured, step.predicted
    if measured is None or predicted is None:
        return [one for one in (measured, predicted) if one is not None]
    is_same = measured.step_ns == predicted.step_ns and measured.copies == predicted.copies
    return [measured] if is_same else [predicted, measured]


def spoken_source(timeline: Timeline) -> str:
    """The source of the times, in words."""
    if timeline.clock == "virtual" and timeline.source == "measured":
        return "run in virtual time"
    return timeline.source


def _draw(figure: Any, shape: Shape, step: SavedStep, title: str) -> None:
    timelines = shown_timelines(step)
    drawn = figure.subplots(len(timelines), 1, sharex=True, squeeze=False).flatten()
    end_ns = max(timeline.step_ns for timeline in timelines)
    for axes, timeline in zip(drawn, timelines, strict=True):
        _draw_one(axes, step, timeline, shape)
    drawn[0].set_xlim(0, 1.03 * end_ns / 1e6)
    drawn[-1].set_xlabel(time_label(shape, timelines[-1].clock))
    set_title(figure, shape, title)
    patch = importlib.import_module("matplotlib.patches").Patch
    edge = SURFACE.light
    waits = patch(facecolor=HOST_STALL.light, edgecolor=edge, hatch="....", label="stall: waits for the host")
    entries = [
        patch(facecolor=REST.light, label="forward"),
        patch(facecolor=REST_SPIKES.light, label="backward"),
        patch(facecolor=BLUE.light, label="copies"),
        patch(facecolor=RELOAD_STALL.light, edgecolor=edge, hatch="////", label="stall: waits for a reload"),
        patch(facecolor=RELEASE_STALL.light, edgecolor=edge, hatch="\\\\\\\\", label="stall: waits for an offload"),
        *([waits] if any(timeline.host_stall_ns for timeline in timelines) else []),
    ]
    figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=1 if shape.is_narrow else len(entries),
        alignment="left",
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0,
    )


def _draw_one(axes: Any, step: SavedStep, timeline: Timeline, shape: Shape) -> None:
    rows = _rows(step, timeline)
    names = list(dict.fromkeys(row.name for row in rows))
    least = timeline.step_ns / _COLUMNS[shape.name]
    for row in rows:
        joined = _joined(row.spans, 0 if len(row.spans) <= _EDGED and not row.hatch else least)
        if row.hatch:
            joined = [(begin, max(end, begin + int(_LEAST_STALL * timeline.step_ns))) for begin, end in joined]
        is_edged = row.hatch or (row.shade is BLUE and len(row.spans) <= _EDGED)
        axes.broken_barh(
            [(begin / 1e6, (end - begin) / 1e6) for begin, end in joined],
            (names.index(row.name) - 0.36, 0.72),
            facecolors=row.shade.light,
            edgecolor=SURFACE.light if is_edged else "none",
            linewidth=0.4 if is_edged else 0,
            hatch=row.hatch or None,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID.light, linewidth=0.8)
    wrapped = textwrap.wrap(summary_of(timeline), 33 if shape.is_narrow else 120)
    axes.set_title("\n".join(wrapped), loc="left", color=MUTED.light, fontsize=FONT_POINTS)


def summary_of(timeline: Timeline) -> str:
    """One line: the time of the step, its stalls and its copies."""
    moved = ", ".join(
        f"{format_bytes(timeline.copied_bytes(track))} {word}"
        for track, word in ((Track.TO_HOST, "offloaded"), (Track.TO_DEVICE, "reloaded"))
    )
    stall = f"{timeline.stall_ns / 1e6:.2f} ms stall" if timeline.stall_ns else "no stall"
    if timeline.host_stall_ns:
        stall += f", {timeline.host_stall_ns / 1e6:.2f} ms waiting for the host"
    return f"{spoken_source(timeline)}: {timeline.step_ns / 1e6:.1f} ms, {stall}; {moved}"


def _rows(step: SavedStep, timeline: Timeline) -> list[_Row]:
    first_use = _first_use(step)
    forward: list[Span] = []
    backward: list[Span] = []
    reloads: list[Span] = []
    releases: list[Span] = []
    host: list[Span] = []
    now = 0
    for mark in timeline.marks:
        computed_ns = max(now, mark.begin_ns - mark.host_stall_ns)
        (forward if mark.point <= first_use else backward).append((now, computed_ns))
        host.append((computed_ns, mark.begin_ns))
        between = mark.begin_ns + mark.reload_stall_ns
        if mark.reload_stall_ns:
            reloads.append((mark.begin_ns, between))
        if mark.release_stall_ns:
            releases.append((between, between + mark.release_stall_ns))
        now = mark.end_ns
    backward.append((now, timeline.step_ns))
    copies = {
        track: sorted((copy.begin_ns, copy.end_ns) for copy in timeline.copies if copy.track is track)
        for track in Track
    }
    return [
        _Row("compute", _joined(forward, 1), REST),
        _Row("compute", _joined(backward, 1), REST_SPIKES),
        _Row("compute", _joined(host, 1), HOST_STALL, "...."),
        _Row("compute", reloads, RELOAD_STALL, "////"),
        _Row("compute", releases, RELEASE_STALL, "\\\\\\\\"),
        _Row("to host", copies[Track.TO_HOST], BLUE),
        _Row("to device", copies[Track.TO_DEVICE], BLUE),
    ]


def _first_use(step: SavedStep) -> int:
    """The first point of the backward pass. A plan adds no points before the first use."""
    points: Sequence[Any] = step.plan.points if step.plan else step.recording.points if step.recording else ()
    return next((index for index, point in enumerate(points) if point.kind is PointKind.USE), len(points))


def _joined(spans: Iterable[Span], gap_ns: float) -> list[Span]:
    """Join spans that are less than `gap_ns` apart."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < gap_ns:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > begin:
            joined.append((begin, end))
    return joined
