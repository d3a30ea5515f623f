"""The picture of the demo: memory over one training step of each model, with everything kept and under the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.report.drawing import WIDE, Shape, quiet_axes, save_figure, time_label, unit_for
from vdnn.report.palette import GREEN, MUTED, VERMILION
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

HEIGHT_INCHES = 4.6


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One step: the recording has the memory with everything kept, the timeline the memory under the plan."""

    title: str
    recording: Recording
    timeline: Timeline
    budget_bytes: int


def draw_steps(steps: Sequence[DrawnStep], path: Path) -> None:
    """Writes a PNG with one panel for each step. Needs matplotlib."""

    def draw(figure: Any, shape: Shape) -> None:
        panels = figure.subplots(1, len(steps), squeeze=False)[0]
        for axes, step in zip(panels, steps, strict=True):
            _draw_step(axes, step, shape)

    save_figure(draw, WIDE, HEIGHT_INCHES, path)


def _draw_step(axes: Any, step: DrawnStep, shape: Shape) -> None:
    kept = [point.peak_bytes for point in step.recording.points]
    kept_ends_ns = list(accumulate(point.compute_ns for point in step.recording.points))
    planned = [mark.peak_bytes for mark in step.timeline.marks]
    planned_ends_ns = [mark.end_ns for mark in step.timeline.marks]
    unit, unit_bytes = unit_for(max(kept))
    quiet_axes(axes)
    for name, shade, held, ends_ns in (
        ("everything kept", MUTED, kept, kept_ends_ns),
        ("under the budget", GREEN, planned, planned_ends_ns),
    ):
        heights = [nbytes / unit_bytes for nbytes in held]
        edges = [0.0, *(end_ns / 1e6 for end_ns in ends_ns)]
        axes.stairs(heights, edges, fill=True, color=shade.light, alpha=0.25, linewidth=0)
        label = f"{name}: peak {format_bytes(max(held))}"
        axes.stairs(heights, edges, baseline=None, color=shade.light, linewidth=1.4, label=label)
    budget_label = f"budget {format_bytes(step.budget_bytes)}"
    axes.axhline(
        step.budget_bytes / unit_bytes, color=VERMILION.light, linestyle="--", linewidth=1.4, label=budget_label
    )
    axes.set_ylim(0, 1.45 * max(kept) / unit_bytes)  # leaves room for the legend above the curves
    axes.set_xlim(left=0)
    axes.set_title(step.title, loc="left")
    axes.set_ylabel(f"bytes on the device ({unit})")
    axes.set_xlabel(time_label(shape, step.timeline.clock))
    axes.legend(loc="upper left")
