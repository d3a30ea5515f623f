"""Draws memory over one step twice in one panel: with everything kept, and as vdnn ran it under its budget.

The page of a run with few cells begins with this figure. memory_over_step.py has the same step in detail, in layers.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.report.drawing import Picture, Shape, quiet_axes, set_title, time_label, unit_for
from vdnn.report.file_names import file_name
from vdnn.report.palette import GREEN, MUTED, VERMILION
from vdnn.step.recording import Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline

_HEADROOM = 1.42  # of the highest curve: the legend stands above the curves


def kept_and_planned_picture(
    step: SavedStep, workload: str, title: str, budget_bytes: int | None = None
) -> Picture | None:
    """The picture of a step; None unless it has a recording and a timeline. `budget_bytes` is the budget of the user,
    of which a plan may leave a part free; without it the budget is that of the plan."""
    recording, timeline = step.recording, step.measured or step.predicted
    if recording is None or timeline is None or not recording.points or not timeline.marks:
        return None
    if budget_bytes is None and step.plan is not None:
        budget_bytes = step.plan.budget_bytes
    peaks = f"{format_bytes(recording.peak_bytes)} with everything kept, {format_bytes(timeline.peak_bytes)} with vdnn"

    def draw(figure: Any, shape: Shape) -> None:
        axes = figure.subplots()
        draw_kept_and_planned(axes, recording, timeline, budget_bytes, shape)
        set_title(figure, shape, title)

    return Picture(
        name=f"kept-and-planned-{file_name(step.name)}",
        title=title,
        described=f"Bytes on the device over one step of {title}: the peak is {peaks}.",
        workload=workload,
        draw=draw,
        height=lambda shape: 4.6 if not shape.is_narrow else 4.2,
    )


def draw_kept_and_planned(
    axes: Any, recording: Recording, timeline: Timeline, budget_bytes: int | None, shape: Shape
) -> None:
    """The recording has the memory with everything kept, the timeline the memory with vdnn."""
    kept = [point.peak_bytes for point in recording.points]
    kept_ends_ns = list(accumulate(point.compute_ns for point in recording.points))
    planned = [mark.peak_bytes for mark in timeline.marks]
    planned_ends_ns = [mark.end_ns for mark in timeline.marks]
    unit, unit_bytes = unit_for(max(kept))
    quiet_axes(axes)
    for name, shade, held, ends_ns in (
        ("everything kept", MUTED, kept, kept_ends_ns),
        ("with vdnn", GREEN, planned, planned_ends_ns),
    ):
        heights = [nbytes / unit_bytes for nbytes in held]
        edges = [0.0, *(end_ns / 1e6 for end_ns in ends_ns)]
        axes.stairs(heights, edges, fill=True, color=shade.light, alpha=0.25, linewidth=0)
        label = f"{name}: peak {format_bytes(max(held))}"
        axes.stairs(heights, edges, baseline=None, color=shade.light, linewidth=1.4, label=label)
    if budget_bytes is not None:
        label = f"budget {format_bytes(budget_bytes)}"
        axes.axhline(budget_bytes / unit_bytes, color=VERMILION.light, linestyle="--", linewidth=1.4, label=label)
    axes.set_ylim(0, _HEADROOM * max(*kept, *planned) / unit_bytes)
    axes.set_xlim(left=0)
    axes.set_ylabel(f"bytes on the device ({unit})")
    axes.set_xlabel(time_label(shape, timeline.clock))
    axes.legend(loc="upper left")
