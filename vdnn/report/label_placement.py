"""Places labels beside points, so that none overlaps another label or a point, or leaves the axes.

The algorithm is greedy: each label in turn takes the nearest free position around its point. A label without a free
position is not drawn, and is returned to the caller. A label far from its point gets a line to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vdnn.report.palette import MUTED, SURFACE, Shade

_DISTANCES = (9, 14, 22, 32, 44, 58, 76, 100)  # points
_LINE_FROM = 22
_MARKER = 7  # half the width that is kept free around a marker
_LINE = 2.5
_BETWEEN = 3  # between two labels
_DIRECTIONS = 16


@dataclass(frozen=True, slots=True)
class Label:
    """A label for a point of the data."""

    text: str
    x: float
    y: float
    shade: Shade


Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels


Point = tuple[float, float]


def place_labels(
    axes: Any, labels: Sequence[Label], points: Sequence[Point] = (), lines: Sequence[Sequence[Point]] = ()
) -> list[Label]:
    """Draw the labels and return those without a free position. Labels avoid all labelled points, `points` and `lines`.
    Fixes the layout of the figure."""
    figure = axes.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    pixels_per_point = figure.dpi / 72
    to_pixels = axes.transData.transform
    marked = [*points, *((one.x, one.y) for one in labels)]
    taken = [_around(to_pixels(point), _MARKER * pixels_per_point) for point in marked]
    for line in lines:
        taken += _along([to_pixels(point) for point in line], _LINE * pixels_per_point)
    frame = axes.get_window_extent(renderer)
    bounds = frame.x0, frame.y0, frame.x1, frame.y1
    left_out = []
    for label in labels:
        text = axes.annotate(label.text, (label.x, label.y), xytext=(0, 0), textcoords="offset points", ha="left")
        size = text.get_window_extent(renderer)
        width, height = size.width, size.height
        text.remove()
        at = to_pixels((label.x, label.y))
        found = _free_box(at, (width, height), pixels_per_point, taken, bounds)
        if found is None:
            left_out.append(label)
            continue
        box, distance = found
        gap = _BETWEEN * pixels_per_point
        taken.append((box[0] - gap, box[1] - gap, box[2] + gap, box[3] + gap))
        _draw(axes, label, box, at, pixels_per_point, has_line=distance >= _LINE_FROM)
    return left_out


def _around(at: Point, half: float) -> Box:
    return at[0] - half, at[1] - half, at[0] + half, at[1] + half


def _along(corners: Sequence[Point], half: float) -> list[Box]:
    """Small boxes along a line."""
    boxes = []
    for begin, end in itertools.pairwise(corners):
        count = max(1, int(math.dist(begin, end) / (2 * half)))
        for index in range(count + 1):
            part = index / count
            boxes.append(_around((begin[0] + part * (end[0] - begin[0]), begin[1] + part * (end[1] - begin[1])), half))
    return boxes


def _free_box(
    at: Point, size: tuple[float, float], scale: float, taken: Sequence[Box], bounds: Box
) -> tuple[Box, float] | None:
    for distance in _DISTANCES:
        for turn in range(_DIRECTIONS):
            # Try the right side first, then directions above and below it in turn.
            angle = (turn + 1) // 2 * (1 if turn % 2 else -1) * 2 * math.pi / _DIRECTIONS
            box = _box(at, size, angle, distance * scale)
            if _is_inside(box, bounds) and not any(_overlap(box, other) for other in taken):
                return box, distance
    return None


def _box(at: Point, size: tuple[float, float], angle: float, distance: float) -> Box:
    """The box of a text whose nearest side or corner is at the distance."""
    across, up = math.cos(angle), math.sin(angle)
    x, y = at[0] + across * distance, at[1] + up * distance
    left = x - size[0] * (1 - across) / 2
    bottom = y - size[1] * (1 - up) / 2
    return left, bottom, left + size[0], bottom + size[1]


def _is_inside(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _draw(axes: Any, label: Label, box: Box, at: Point, scale: float, *, has_line: bool) -> None:
    """Draw the line below all texts, and the text on a background of its own."""
    to_right = (box[0] + box[2]) / 2 >= at[0]
    corner = (box[0] if to_right else box[2]) - at[0], (box[1] + box[3]) / 2 - at[1]
    offset = {"xytext": (corner[0] / scale, corner[1] / scale), "textcoords": "offset points"}
    if has_line:
        line = {"arrowstyle": "-", "color": MUTED.light, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 5}
        axes.annotate("", (label.x, label.y), **offset, arrowprops=line, zorder=2)
    axes.annotate(
        label.text,
        (label.x, label.y),
        **offset,
        ha="left" if to_right else "right",
        va="center",
        color=label.shade.light,
        bbox={"facecolor": SURFACE.light, "edgecolor": "none", "pad": 0.6},
        zorder=5,
    )
