"""Draws prediction against measurement: the time and the peak of every cell that has both.

Both axes are logarithmic with the same scale, so that the distance from the diagonal is the relative error. The largest
errors are also written beside their points.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vdnn.report.cell import Cell
from vdnn.report.drawing import Picture, Shape, plain_number, quiet_axes, set_title
from vdnn.report.label_placement import Label, place_labels
from vdnn.report.palette import BLUE, GREEN, MUTED, ORANGE, PURPLE, SKY, SURFACE, VERMILION, Look

_GIB = 2**30
_LOOKS = tuple(
    Look(shade, marker)
    for shade, marker in zip((BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY), ("o", "s", "D", "^", "v", "P"), strict=True)
)
_NAMED = 3  # how many of the largest errors are written
_WORTH_NAMING = 0.005


@dataclass(frozen=True, slots=True)
class Predicted:
    """One predicted and measured number of one cell, in ms or in GiB."""

    cell: Cell
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error: 0.1 is a tenth more than predicted."""
        return self.measured / self.predicted - 1


def times_of(cells: Sequence[Cell]) -> list[Predicted]:
    return [
        Predicted(cell, cell.predicted_step_ns / 1e6, cell.step_ns / 1e6)
        for cell in cells
        if cell.is_measured and cell.predicted_step_ns and cell.step_ns
    ]


def peaks_of(cells: Sequence[Cell]) -> list[Predicted]:
    return [
        Predicted(cell, cell.predicted_peak_bytes / _GIB, cell.peak_bytes / _GIB)
        for cell in cells
        if cell.is_measured and cell.predicted_peak_bytes and cell.peak_bytes
    ]


def errors_text(predicted: Sequence[Predicted], what: str) -> str:
    """A sentence with the median error and the worst error."""
    worst = max(predicted, key=lambda one: abs(one.error))
    median = statistics.median(abs(one.error) for one in predicted)
    if not worst.error:
        count = "" if len(predicted) == 1 else f" in all {len(predicted)} rows"
        return f"{what}: exactly as predicted{count}"
    name = f"{worst.cell.workload} {worst.cell.budget or worst.cell.peer}"
    return (
        f"{what}: median error {100 * median:.2f} % of {len(predicted)}, "
        f"largest error {100 * worst.error:+.2f} % ({name})"
    )


def prediction_picture(cells: Sequence[Cell]) -> Picture:
    """The picture of all cells. At least one has to be both predicted and measured."""
    return Picture(
        name="prediction",
        title="Prediction against measurement",
        described="Predicted against measured step times and peaks, on and around the diagonal.",
        workload="",
        draw=lambda figure, shape: _draw(figure, shape, cells),
        height=lambda shape: 4.9 if not shape.is_narrow else 7.4 + 0.21 * len({cell.workload for cell in cells}),
    )


def _draw(figure: Any, shape: Shape, cells: Sequence[Cell]) -> None:
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    looks = {name: _LOOKS[index % len(_LOOKS)] for index, name in enumerate(workloads)}
    shown = [("time of a step", "ms", times_of(cells)), ("peak memory", "GiB", peaks_of(cells))]
    shown = [one for one in shown if one[2]]
    grid = (len(shown), 1) if shape.is_narrow else (1, len(shown))
    drawn = figure.subplots(*grid, squeeze=False).flatten()
    for axes, (what, unit, predicted) in zip(drawn, shown, strict=True):
        _draw_panel(axes, f"{what} ({unit})", predicted, looks)
    set_title(figure, shape, "Prediction against measurement")
    seen = {one.cell.workload for _, _, predicted in shown for one in predicted}
    line = importlib.import_module("matplotlib.lines").Line2D
    entries = [
        line([], [], linestyle="none", marker=looks[name].marker, color=looks[name].shade.light, label=name)
        for name in workloads
        if name in seen
    ]
    figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=1 if shape.is_narrow else min(5, len(entries)),
        alignment="left",
        handlelength=1,
        borderaxespad=0,
    )
    for axes, (_, _, predicted) in zip(drawn, shown, strict=True):
        worst = sorted(predicted, key=lambda one: -abs(one.error))[:_NAMED]
        labels = [
            Label(f"{100 * one.error:+.1f} %", one.predicted, one.measured, looks[one.cell.workload].shade)
            for one in worst
            if abs(one.error) >= _WORTH_NAMING
        ]
        place_labels(axes, labels, [(one.predicted, one.measured) for one in predicted])


def ticks_between(low: float, high: float) -> list[float]:
    """Ticks at 1, 2 and 5 times the powers of ten, at the powers alone if there are many decades, and at more multiples
    if the range is narrow."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,) if len(decades) > 5 else (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) > 1:
            break
    return found


def _draw_panel(axes: Any, what: str, predicted: Sequence[Predicted], looks: dict[str, Look]) -> None:
    quiet_axes(axes)
    numbers = [number for one in predicted for number in (one.predicted, one.measured)]
    low, high = min(numbers) / 1.35, max(numbers) * 1.35
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=MUTED.light, alpha=0.14)
    axes.plot([low, high], [low, high], color=MUTED.light, linewidth=1)
    for one in predicted:
        look = looks[one.cell.workload]
        axes.plot(
            [one.predicted],
            [one.measured],
            marker=look.marker,
            markersize=7.5,
            color=look.shade.light,
            markeredgecolor=SURFACE.light,
            markeredgewidth=0.8,
            linestyle="none",
        )
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal", adjustable="box", anchor="W")
    ticker = importlib.import_module("matplotlib.ticker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.FixedLocator(ticks_between(low, high)))
        axis.set_major_formatter(ticker.FuncFormatter(lambda number, _: plain_number(number)))
        axis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel(f"predicted {what}")
    is_virtual = all(one.cell.clock == "virtual" for one in predicted)
    axes.set_ylabel(f"{what} in virtual time" if is_virtual else f"measured {what}")
    axes.set_title("band: 10 %", loc="left", color=MUTED.light)
