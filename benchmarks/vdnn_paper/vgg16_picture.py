"""Draws the picture of `make bench`: peak against time of each policy, and one step of VGG-16 (256).

It is drawn with matplotlib without a screen, from the same measured steps as the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from benchmarks.vdnn_paper.policy_steps import BUDGET, KEEP, VDNN_ALL, VDNN_CONV, WAYS, MeasuredStep, PolicyFigures, Way
from vdnn.step.timeline import Timeline, Track

# Okabe and Ito's colours, which most colour-blind people can distinguish.
COLOURS = {KEEP: "#4d4d4d", VDNN_ALL: "#0072b2", VDNN_CONV: "#e69f00", BUDGET: "#009e73"}
LIMIT_COLOUR = "#d55e00"
# Shapes and sizes differ too, because a budget that keeps everything has the points of keep.
SHAPES = {KEEP: "o", VDNN_ALL: "s", VDNN_CONV: "D", BUDGET: "o"}
SHOWN_STEPS = (KEEP, VDNN_ALL, BUDGET)
GIB = 2**30
WIDEST_GIB = 24


def draw(steps: Sequence[MeasuredStep], path: Path) -> None:
    """Draw the picture and write it as PNG."""
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    trades, ran = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    _draw_trades(trades.subplots(), [step.figures for step in steps])
    _draw_step(ran, {step.figures.way: step for step in steps if step.figures.batch == max_batch(steps)})
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def max_batch(steps: Sequence[MeasuredStep]) -> int:
    return max(step.figures.batch for step in steps)


# Peak against time.


def _draw_trades(axes: Any, rows: Sequence[PolicyFigures]) -> None:
    limit_gib = rows[0].device_bytes / GIB
    axes.axvspan(limit_gib, WIDEST_GIB, color=LIMIT_COLOUR, alpha=0.07, linewidth=0)
    axes.axvline(limit_gib, color=LIMIT_COLOUR, linestyle="--", linewidth=1.5)
    axes.annotate(
        f"does not fit\nthe Titan X: {limit_gib:.0f} GiB",
        (limit_gib, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=LIMIT_COLOUR,
        va="bottom",
    )
    for way in WAYS:
        own = sorted((row for row in rows if row.way == way), key=lambda row: row.batch)
        axes.plot(
            [row.peak_bytes / GIB for row in own],
            [row.step_ns / 1e9 for row in own],
            label=way.name,
            color=COLOURS[way],
            marker=SHAPES[way],
            markersize=13 if way is BUDGET else 7,
            markerfacecolor="none" if way is BUDGET else COLOURS[way],
            markeredgewidth=2,
            linewidth=1,
            alpha=0.9,
        )
    for row in rows:
        if row.way in (KEEP, VDNN_ALL):
            _label_batch(axes, row)
    axes.set_xlim(0, WIDEST_GIB)
    axes.set_ylim(0, 7.8)
    axes.xaxis.set_major_locator(MultipleLocator(4))
    axes.set_xlabel("peak of bytes on the device (GiB)")
    axes.set_ylabel("step time (s, virtual)")
    batches = ", ".join(str(batch) for batch in sorted({row.batch for row in rows}))
    axes.set_title(f"(a) VGG-16 at batch {batches}: peak and time of a step", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", title="policy")


def _label_batch(axes: Any, row: PolicyFigures) -> None:
    """Label the slowest and the largest point of each batch. The points between them have the same batch."""
    offset, align = ((-9, -3), "right") if row.way == VDNN_ALL else ((11, -4), "left")
    axes.annotate(
        str(row.batch),
        (row.peak_bytes / GIB, row.step_ns / 1e9),
        xytext=offset,
        textcoords="offset points",
        ha=align,
        fontsize=9,
        color=COLOURS[row.way],
    )


# One step.


def _draw_step(figure: Any, steps: dict[Way, MeasuredStep]) -> None:
    held, copies = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    batch = steps[KEEP].figures.batch
    limit_gib = steps[KEEP].figures.device_bytes / GIB
    for way in SHOWN_STEPS:
        _draw_held(held, way, steps[way].timeline)
    held.axhline(limit_gib, color=LIMIT_COLOUR, linestyle="--", linewidth=1.5)
    longest_s = max(steps[way].figures.step_ns for way in SHOWN_STEPS) / 1e9
    held.annotate(
        f"Titan X: {limit_gib:.0f} GiB",
        (longest_s, limit_gib),
        xytext=(0, 4),
        textcoords="offset points",
        color=LIMIT_COLOUR,
        ha="right",
        va="bottom",
    )
    held.set_xlim(0, longest_s * 1.01)
    held.set_ylim(0, 20.5)
    held.yaxis.set_major_locator(MultipleLocator(4))
    held.set_ylabel("bytes on the device (GiB)")
    held.set_title(f"(b) one step of VGG-16 ({batch}): bytes on the device, and copies", loc="left", fontsize=11)
    held.grid(alpha=0.25)
    held.legend(loc="upper right", title="policy")
    _draw_copies(copies, steps)


def _draw_held(axes: Any, way: Way, timeline: Timeline) -> None:
    """Draw the highest bytes between each two marks, so that the top of the line is the step's peak."""
    edges = [0.0, *(mark.end_ns / 1e9 for mark in timeline.marks)]
    highest = [mark.peak_bytes / GIB for mark in timeline.marks]
    axes.stairs(highest, edges, label=way.name, color=COLOURS[way], linewidth=1.8, baseline=None)


def _draw_copies(axes: Any, steps: dict[Way, MeasuredStep]) -> None:
    tracks = [(way, track) for way in SHOWN_STEPS if way is not KEEP for track in Track]
    for row, (way, track) in enumerate(tracks):
        spans = [
            (copy.begin_ns / 1e9, (copy.end_ns - copy.begin_ns) / 1e9)
            for copy in steps[way].timeline.copies
            if copy.track is track
        ]
        # Edges separate copies that follow each other immediately.
        axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=COLOURS[way], edgecolor="white", linewidth=0.5)
    axes.set_yticks(range(len(tracks)), [f"{way.name}\n{track.value}" for way, track in tracks])
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlabel("time since the step began (s, virtual)")
    axes.grid(axis="x", alpha=0.25)
