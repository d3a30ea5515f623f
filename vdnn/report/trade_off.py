"""Draws memory against the time of a step, one picture for each comparison. Peers are points, vdnn is a curve.

Both axes are relative to plain if it was measured, else they are in bytes and ms. A point that takes far more time
than the others is drawn at the upper edge, with its name and its number above. A point is filled
if no other point is better in both memory and time, else hollow.
"""

from __future__ import annotations

import importlib
import os
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vdnn.bytesize import format_bytes
from vdnn.report.cell import Cell
from vdnn.report.comparison import Comparison
from vdnn.report.drawing import FONT_POINTS, NARROW, WIDE, Picture, Shape, quiet_axes, save_figure, set_title, unit_for
from vdnn.report.file_names import file_name
from vdnn.report.label_placement import Label, Point, place_labels
from vdnn.report.palette import MUTED, SURFACE, Look, Shade, looks_of

_TALLEST = 4.0  # times the median of the extra times: a point above that is drawn at the edge
_TALLEST_TIME = 2.0  # without plain: times the median of the times
_LEAST_SPAN = 0.12  # of the axis of time, relative
_SAME_POINT = 0.012  # of both axes: nearer points have one label
_ARROW, _ROW, _LABEL_GAP = 17, 16, 6  # points: an arrow above the edge, a row of labels there, from arrow to label


class _Spot(NamedTuple):
    """A cell in the picture."""

    cell: Cell
    x: float
    y: float
    is_off: bool  # above the upper edge
    is_relative: bool
    more: float  # the true y, which may be above the upper edge


class _Scale(NamedTuple):
    """The scale of the axes. The unit is that of peaks, if they are not relative."""

    is_relative: bool
    top: float
    unit: str = ""
    unit_bytes: int = 1


def trade_off_picture(comparison: Comparison, looks: dict[str, Look]) -> Picture:
    names = ", ".join(dict.fromkeys(cell.peer for cell in comparison.measured))
    return Picture(
        name=f"trade-off-{file_name(comparison.name, comparison.where)}",
        title=f"{comparison.name} on {comparison.where}: memory against time",
        described=f"Peak memory against the time of one step of {comparison.name} on {comparison.where}, for {names}.",
        workload=comparison.workload,
        draw=lambda figure, shape: _draw(figure, shape, comparison, looks),
        height=lambda shape: 4.9 if not shape.is_narrow else 4.0 + 0.21 * _legend_rows(comparison),
    )


def draw_trade_off(cells: Sequence[Cell], path: str | os.PathLike[str], *, narrow: bool = False) -> None:
    """Draw cells of one workload on one device, as .png or .svg. Needs matplotlib."""
    first = cells[0]
    comparison = Comparison(
        first.workload, first.batch, first.place, first.device, first.clock, first.compiled, tuple(cells)
    )
    picture, shape = trade_off_picture(comparison, looks_of(cells)), NARROW if narrow else WIDE
    save_figure(picture.draw, shape, picture.height(shape), Path(path))


def _draw(figure: Any, shape: Shape, comparison: Comparison, looks: dict[str, Look]) -> None:
    axes = figure.subplots()
    scale = _scale(comparison)
    spots = [_spot(comparison, cell, scale) for cell in comparison.measured]
    quiet_axes(axes)
    _set_axes(axes, comparison, scale, spots)
    curves = _draw_spots(axes, spots, looks, has_arrows=shape.is_narrow)
    _write_around(figure, shape, comparison)
    if shape.is_narrow:
        entries = [_entry(spots, peer, looks[peer]) for peer in dict.fromkeys(one.cell.peer for one in spots)]
        figure.legend(handles=entries, loc="outside lower left", alignment="left", handlelength=1.2, borderaxespad=0)
        return
    level = [[(0.0, 0.0), (axes.get_xlim()[1], 0.0)]] if scale.is_relative else []
    _name_above(axes, [spot for spot in spots if spot.is_off], looks)
    hidden = [(spot.x, spot.y) for spot in spots if spot.is_off]
    place_labels(axes, _labels(axes, spots, looks), hidden, lines=[*curves, *level])


def _scale(comparison: Comparison) -> _Scale:
    if comparison.baseline is None:
        times = [(cell.step_ns or 0) / 1e6 for cell in comparison.measured]
        shown = [one for one in times if one <= _TALLEST_TIME * statistics.median(times)]
        return _Scale(False, 1.25 * max(shown), *unit_for(max(cell.peak_bytes or 0 for cell in comparison.measured)))
    more = [100 * (comparison.more_time(cell) or 0) for cell in comparison.measured]
    usual = statistics.median([one for one in more if one > 0.05] or [0])
    shown = [one for one in more if one <= max(100 * _LEAST_SPAN, _TALLEST * usual)]
    return _Scale(True, max(100 * _LEAST_SPAN, 1.25 * max(shown)))


def _spot(comparison: Comparison, cell: Cell, scale: _Scale) -> _Spot:
    x, y = (cell.peak_bytes or 0) / scale.unit_bytes, (cell.step_ns or 0) / 1e6
    if scale.is_relative:
        x, y = 100 * (comparison.memory_share(cell) or 0), 100 * (comparison.more_time(cell) or 0)
    return _Spot(cell, x, min(y, scale.top), y > scale.top, scale.is_relative, y)


def _set_axes(axes: Any, comparison: Comparison, scale: _Scale, spots: Sequence[_Spot]) -> None:
    unit = "virtual " if comparison.is_virtual else ""
    widest = max(spot.x for spot in spots)
    axes.set_xlim(0, 1.12 * widest)
    lowest = min(0.0, *(1.15 * spot.y for spot in spots))
    axes.set_ylim(lowest - 0.04 * (scale.top - lowest) if scale.is_relative else 0, scale.top)
    if not scale.is_relative:
        axes.set_xlabel(f"peak memory ({scale.unit})")
        axes.set_ylabel(f"{unit}time of a step (ms)")
        return
    axes.set_xlabel("peak memory (% of plain)")
    axes.set_ylabel(f"{unit}time of a step\n(% more than plain)")
    axes.axhline(0, color=MUTED.light, linewidth=0.9)


def _unbeaten(spots: Sequence[_Spot]) -> set[int]:
    """The indices of the spots that no other spot beats in both memory and time."""
    return {
        index
        for index, spot in enumerate(spots)
        if not any(
            other.x <= spot.x and other.more <= spot.more and (other.x, other.more) != (spot.x, spot.more)
            for other in spots
        )
    }


def _draw_spots(axes: Any, spots: Sequence[_Spot], looks: dict[str, Look], *, has_arrows: bool) -> list[list[Point]]:
    """Draw the spots and the curves. Returns the curves, for labels to avoid."""
    curves = []
    for peer in dict.fromkeys(spot.cell.peer for spot in spots if spot.cell.is_vdnn):
        curve = sorted((spot.x, spot.more) for spot in spots if spot.cell.peer == peer)
        if len(curve) > 1:
            axes.plot(*zip(*curve, strict=True), color=looks[peer].shade.light, linewidth=2, zorder=3)
            curves.append(curve)
    unbeaten = _unbeaten(spots)
    for index, spot in enumerate(spots):
        look = looks[spot.cell.peer]
        axes.plot(
            [spot.x],
            [spot.y],
            marker=look.marker,
            markersize=8.5,
            color=look.shade.light,
            markerfacecolor=look.shade.light if index in unbeaten else SURFACE.light,
            markeredgewidth=1.8,
            linestyle="none",
            clip_on=False,
            zorder=4,
        )
        if spot.is_off and has_arrows:
            _draw_arrow(axes, spot.x, look.shade, _ARROW)
    return curves


def _draw_arrow(axes: Any, x: float, shade: Shade, length: float) -> None:
    axes.annotate(
        "",
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, length),
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": shade.light, "linewidth": 1.6, "shrinkB": 4},
    )


def _name_above(axes: Any, spots: Sequence[_Spot], looks: dict[str, Look]) -> None:
    """Draw the arrow and the name of each spot above the upper edge. A name that reaches over the next arrow to its
    right stands a row higher than that one's, so that no name lies on another or is crossed."""
    figure = axes.figure
    figure.draw_without_rendering()  # lays the figure out, for the places of the arrows
    scale = figure.dpi / 72
    placed: list[tuple[float, int]] = []  # the place of the arrow in pixels, and the row of its name
    for spot in sorted(spots, key=lambda one: one.x, reverse=True):
        shade = looks[spot.cell.peer].shade
        text = axes.annotate(
            f"{_name_of(spot, is_named=True)}, {_time_of(spot)}",
            (spot.x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 0),
            textcoords="offset points",
            color=shade.light,
        )
        at = float(axes.transData.transform((spot.x, spot.y))[0])
        end = at + text.get_window_extent(figure.canvas.get_renderer()).width + 2 * _LABEL_GAP * scale
        row = max((1 + other for x, other in placed if x - _LABEL_GAP * scale < end), default=0)
        text.set_position((_LABEL_GAP, _ARROW + _ROW * row - 4))
        _draw_arrow(axes, spot.x, shade, _ARROW + _ROW * row + 4)
        placed.append((at, row))


def _name_of(spot: _Spot, *, is_named: bool) -> str:
    cell = spot.cell
    if not cell.is_vdnn or not cell.budget:
        return cell.peer
    if not is_named:
        return cell.budget_text
    if cell.budget.startswith("="):
        return f"{cell.peer} at the {cell.budget_text}"
    return f"{cell.peer}, {'least budget' if cell.budget == 'min' else f'budget {cell.budget_text}'}"


def _labels(axes: Any, spots: Sequence[_Spot], looks: dict[str, Look]) -> list[Label]:
    """Labels of the spots in the axes: names of peers, budgets of vdnn's points. The longest, with vdnn's name, is
    first. Peers at one point have one label."""
    labels = []
    named = _named_spots(spots)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    seen: list[_Spot] = []
    for spot in sorted(spots, key=lambda one: (one not in named, one.cell.is_vdnn, not one.cell.is_plain, one.x)):
        if spot.is_off or spot in seen:
            continue
        near = [spot]
        if not spot.cell.is_vdnn:
            near += [
                other
                for other in spots
                if not (other is spot or other.cell.is_vdnn or other.is_off or other in seen)
                and abs(other.x - spot.x) < _SAME_POINT * (right - left)
                and abs(other.y - spot.y) < _SAME_POINT * (high - low)
            ]
        seen += near
        text = ", ".join(_name_of(one, is_named=one in named) for one in near)
        labels.append(Label(text, spot.x, spot.y, looks[spot.cell.peer].shade))
    return labels


def _named_spots(spots: Sequence[_Spot]) -> list[_Spot]:
    """The spot of each curve that has its name: the middle one, which has the most room."""
    named = []
    for peer in dict.fromkeys(spot.cell.peer for spot in spots if spot.cell.is_vdnn):
        own = sorted((one for one in spots if one.cell.peer == peer), key=lambda one: (one.is_off, one.x))
        seen = [one for one in own if not one.is_off] or own
        named.append(seen[len(seen) // 2])
    return named


def _entry(spots: Sequence[_Spot], peer: str, look: Look) -> Any:
    """An entry of the legend below a narrow picture, which has no room for names beside the points."""
    line = importlib.import_module("matplotlib.lines").Line2D
    own = [spot for spot in spots if spot.cell.peer == peer]
    text = peer
    if len(own) == 1 and not own[0].cell.is_plain:
        at = f"{own[0].x:.0f} %" if own[0].is_relative else format_bytes(own[0].cell.peak_bytes or 0)
        text = f"{peer}: {at}, {_time_of(own[0])}"
    is_curve = len(own) > 1 and own[0].cell.is_vdnn
    style = {"linestyle": "-" if is_curve else "none", "linewidth": 2, "markersize": 8.5}
    return line([], [], color=look.shade.light, marker=look.marker, label=text, **style)


def _time_of(spot: _Spot) -> str:
    """The true time, also of a spot above the upper edge."""
    if not spot.is_relative:
        return f"{spot.more:.0f} ms"
    return f"{spot.more:+.0f} %" if abs(spot.more) >= 10 else f"{spot.more:+.1f} %"


def _legend_rows(comparison: Comparison) -> int:
    return len({cell.peer for cell in comparison.measured})


def _write_around(figure: Any, shape: Shape, comparison: Comparison) -> None:
    """Write the title above, and below the peers that have no point in the picture."""
    set_title(figure, shape, f"{comparison.name} on {comparison.where}")
    drawn = {cell.peer for cell in comparison.measured}
    ended: dict[str, list[str]] = {}
    for cell in comparison.unmeasured:
        if cell.peer not in drawn:  # the curve of vdnn ends where no smaller budget can be met
            ended.setdefault(cell.status.replace("-", " "), []).append(cell.peer)
    if ended and shape.has_title and not shape.is_narrow:  # a page says it below
        said = "; ".join(f"{status}: {', '.join(dict.fromkeys(peers))}" for status, peers in ended.items())
        figure.supxlabel(
            "\n".join(textwrap.wrap(f"Not drawn: {said}", 110)),
            x=0.01,
            ha="left",
            color=MUTED.light,
            fontsize=FONT_POINTS,
        )
