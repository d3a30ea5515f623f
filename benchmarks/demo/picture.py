"""The picture of the demo: memory over one training step of each model, with everything kept and with vdnn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vdnn.report.drawing import WIDE, Shape, save_figure
from vdnn.report.memory_over_step import draw_kept_and_planned
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
            draw_kept_and_planned(axes, step.recording, step.timeline, step.budget_bytes, shape)
            axes.set_title(step.title, loc="left")

    save_figure(draw, WIDE, HEIGHT_INCHES, path)
