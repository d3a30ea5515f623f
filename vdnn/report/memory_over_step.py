"""Draws memory over one step, with everything kept and under the plan, in layers by action.

The bottom layer is always resident, the top layer is gradients and workspaces. The largest storages are outlined and
numbered in both panels, and named below. The picture has one interval for each column of a screen: the highest one, so
that the peak is exact.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from vdnn.bytesize import format_bytes
from vdnn.report.drawing import FONT_POINTS, Picture, Shape, quiet_axes, set_title, time_label, unit_for
from vdnn.report.file_names import file_name
from vdnn.report.held_bytes import HeldBytes, actions_of, held_after, held_before, peaks_at_points
from vdnn.report.label_placement import Label, place_labels
from vdnn.report.palette import ACTION_SHADES, GREEN, INK, MUTED, REST, REST_SPIKES, SURFACE, VERMILION, Shade
from vdnn.report.storage_table import storage_name
from vdnn.step.plan import Action
from vdnn.step.recording import Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline

_COLUMNS = {"wide": 260, "narrow": 150}
_VISIBLE = 0.01  # of the height: a measured line nearer than that would cover the edge of the layers
_LEAST_OUTLINED = 0.012  # of the height: thinner storages have no outline and no number
_NAMED = {"wide": 5, "narrow": 4}
_ORDER = (Action.KEEP, Action.OFFLOAD, Action.COMPRESS, Action.RECOMPUTE)
_WORDS: dict[Action | None, str] = {
    Action.KEEP: "kept",
    Action.OFFLOAD: "offloaded",
    Action.RECOMPUTE: "recomputed",
    Action.COMPRESS: "compressed",
    None: "saved for backward",
}


class _Layer(NamedTuple):
    """One layer. `named` has the number (from 1) and the heights of each numbered storage in it, from the bottom up."""

    shade: Shade
    heights: list[int]
    named: tuple[tuple[int, list[int]], ...] = ()


class _Panel(NamedTuple):
    title: str
    unit_bytes: int  # of its heights
    edges_ns: list[int]
    layers: list[_Layer]
    measured: list[int]  # empty if it equals the sum of the layers


def memory_picture(step: SavedStep, workload: str, title: str) -> Picture:
    """The picture of a step, which must have a recording."""
    recording = step.recording
    if recording is None:
        raise RuntimeError(f"expected a recording of the step {step.name!r}, got none.")
    return Picture(
        name=f"memory-{file_name(step.name)}",
        title="Memory over one step, with everything kept and under the plan",
        described=f"Bytes on the device over one step of {title}: with everything kept, and under the plan.",
        workload=workload,
        draw=lambda figure, shape: _draw(figure, shape, step, recording, title),
        height=lambda shape: 5.0 if not shape.is_narrow else 7.4,
    )


def _draw(figure: Any, shape: Shape, step: SavedStep, recording: Recording, title: str) -> None:
    plan, timeline = step.plan, step.measured or step.predicted
    largest = _largest(recording.lifetimes, _NAMED[shape.name])
    actions = actions_of(recording, plan)
    shown = [("everything kept", held_before(recording))]
    if plan is not None:
        shown.append((f"under the plan, {_how(timeline)}", held_after(recording, plan, timeline)))
    tallest_bytes = max(max(max(held.total), held.peak_bytes) for _, held in shown)
    unit, unit_bytes = unit_for(tallest_bytes)
    tallest = tallest_bytes / unit_bytes
    panels = [_panel(title, unit_bytes, held, actions, largest, shape) for title, held in shown]
    if step.predicted is not None and len(panels) > 1 and _is_as_predicted(shown[1][1], step.predicted):
        panels[1] = panels[1]._replace(measured=[])
    grid = (len(panels), 1) if shape.is_narrow else (1, len(panels))
    drawn = figure.subplots(*grid, sharex=True, sharey=True, squeeze=False).flatten()
    end_ms = max(panel.edges_ns[-1] for panel in panels) / 1e6
    numbers = [_draw_panel(axes, panel, tallest) for axes, panel in zip(drawn, panels, strict=True)]
    drawn[0].set_xlim(0, 1.03 * end_ms)
    for axes in drawn if shape.is_narrow else drawn[:1]:
        axes.set_ylabel(f"on the device ({unit})")
    for axes in drawn[-1:] if shape.is_narrow else drawn:
        axes.set_xlabel(time_label(shape, recording.clock))
    if plan is not None and plan.budget_bytes is not None:
        _draw_budget(drawn, plan.budget_bytes, unit_bytes, end_ms)
    set_title(figure, shape, title)
    outlined = {int(label.text) for labels in numbers for label in labels}
    has_line = any(panel.measured for panel in panels)
    _write_legend(figure, shape, recording, actions, (largest, outlined), has_line=has_line)
    budget = []
    if plan is not None and plan.budget_bytes is not None:
        budget = [_budget_label_line(plan.budget_bytes / unit_bytes, end_ms, tallest)]
    for axes, labels in zip(drawn, numbers, strict=True):
        place_labels(axes, labels, lines=budget)


def _largest(lifetimes: Sequence[Any], most: int) -> list[int]:
    return sorted(range(len(lifetimes)), key=lambda index: (-lifetimes[index].nbytes, index))[:most]


def _how(timeline: Timeline | None) -> str:
    if timeline is None:
        return "not run"
    return "in virtual time" if timeline.source == "measured" and timeline.clock == "virtual" else timeline.source


def _panel(
    title: str,
    unit_bytes: int,
    held: HeldBytes,
    actions: Sequence[Action | None],
    largest: Sequence[int],
    shape: Shape,
) -> _Panel:
    """The layers from the bottom up."""
    chosen, edges = _thinned(held, _COLUMNS[shape.name])

    def thin(heights: Sequence[int]) -> list[int]:
        return [heights[interval] for interval in chosen]

    besides = held.besides()
    always = min(besides)
    layers = [_Layer(REST, [always] * len(chosen))]
    for action in (None, *_ORDER):
        own = [index for index, one in enumerate(actions[: len(held.sizes)]) if one is action]
        if own:
            named = [(largest.index(index) + 1, thin(held.bytes_of([index]))) for index in own if index in largest]
            layers.append(_Layer(ACTION_SHADES[action], thin(held.bytes_of(own)), tuple(named)))
    layers.append(_Layer(REST_SPIKES, thin([nbytes - always for nbytes in besides])))
    ends = f"peak {format_bytes(held.peak_bytes)}, {held.ends_ns[-1] / 1e6:.1f} ms"
    measured = thin(held.measured) if held.measured is not None and _differ(held.measured, held.total) else []
    return _Panel(f"{title}:{chr(10) if shape.is_narrow else ' '}{ends}", unit_bytes, edges, layers, measured)


def _is_as_predicted(held: HeldBytes, predicted: Timeline) -> bool:
    """True if the measured bytes are those predicted. Copies at a point need memory for a moment that no layer shows,
    and the prediction includes it."""
    return held.measured is not None and not _differ(held.measured, peaks_at_points(len(held.total), predicted))


def _differ(measured: Sequence[int], total: Sequence[int]) -> bool:
    """True if the difference is visible in the picture."""
    most = max(abs(one - other) for one, other in zip(measured, total, strict=True))
    return most > _VISIBLE * max(total)


def _thinned(held: HeldBytes, columns: int) -> tuple[list[int], list[int]]:
    """The highest interval of each column of the picture that has any, and the edges between them."""
    width = max(1, held.ends_ns[-1]) / columns
    chosen: list[int] = []
    edges = [0]
    last_column = -1
    for interval, end_ns in enumerate(held.ends_ns):
        column = int(end_ns / width)
        if column != last_column or not chosen:
            last_column = column
            chosen.append(interval)
            edges.append(end_ns)
            continue
        edges[-1] = end_ns
        if held.total[interval] > held.total[chosen[-1]]:
            chosen[-1] = interval
    return chosen, edges


def _draw_panel(axes: Any, panel: _Panel, tallest: float) -> list[Label]:
    """Draw one panel. Returns the labels with the numbers of storages, which are placed later."""
    quiet_axes(axes)
    axes.set_ylim(0, 1.08 * tallest)
    axes.set_title(panel.title, loc="left")
    edges = [edge / 1e6 for edge in panel.edges_ns]
    labels = []
    below = [0.0] * len(panel.layers[0].heights)
    for layer in panel.layers:
        above = _on(below, layer.heights, panel.unit_bytes)
        if any(layer.heights):
            axes.stairs(above, edges, baseline=below, fill=True, color=layer.shade.light, linewidth=0)
        low = below
        for number, heights in layer.named:
            high = _on(low, heights, panel.unit_bytes)
            if max(heights) / panel.unit_bytes >= _LEAST_OUTLINED * tallest:
                labels.append(_outline(axes, edges, (low, high), heights, number))
            low = high
        below = above
    if panel.measured:
        held = [nbytes / panel.unit_bytes for nbytes in panel.measured]
        axes.stairs(held, edges, baseline=None, color=INK.light, linewidth=1.1)
    return labels


def _on(below: Sequence[float], heights: Sequence[int], unit_bytes: int) -> list[float]:
    return [low + height / unit_bytes for low, height in zip(below, heights, strict=True)]


def _outline(
    axes: Any, edges: Sequence[float], band: tuple[list[float], list[float]], heights: Sequence[int], number: int
) -> Label:
    """Outline each stretch of columns in which the storage is present. Its number stands in the longest."""
    low, high = band
    stretches: list[list[int]] = []
    for column, height in enumerate(heights):
        if height and stretches and stretches[-1][-1] == column - 1:
            stretches[-1].append(column)
        elif height:
            stretches.append([column])
    for stretch in stretches:
        present = slice(stretch[0], stretch[-1] + 1)
        around = edges[stretch[0] : stretch[-1] + 2]
        axes.stairs(high[present], around, baseline=low[present], fill=False, color=SURFACE.light, linewidth=0.9)
    longest = max(stretches, key=lambda stretch: edges[stretch[-1] + 1] - edges[stretch[0]])
    # The numbers stand at different times, because those of nested storages would overlap otherwise.
    column = longest[min(len(longest) - 1, len(longest) * (1 + number) // 8)]
    return Label(str(number), (edges[column] + edges[column + 1]) / 2, (low[column] + high[column]) / 2, INK)


def _budget_label_line(budget: float, end_ms: float, tallest: float) -> list[tuple[float, float]]:
    """A line through the label of the budget, for other labels to avoid."""
    height = budget + 0.035 * tallest
    return [(0.6 * end_ms, height), (end_ms, height)]


def _draw_budget(drawn: Sequence[Any], budget_bytes: int, unit_bytes: int, end_ms: float) -> None:
    for axes in drawn:
        axes.axhline(budget_bytes / unit_bytes, color=VERMILION.light, linestyle="--", linewidth=1.4)
    drawn[-1].annotate(
        f"budget {format_bytes(budget_bytes)}",
        (end_ms, budget_bytes / unit_bytes),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=VERMILION.light,
    )


def _write_legend(
    figure: Any,
    shape: Shape,
    recording: Recording,
    actions: Sequence[Action | None],
    named: tuple[Sequence[int], set[int]],
    *,
    has_line: bool,
) -> None:
    """Write the colours, and the largest storages: outlined storages by number, the others after a dash."""
    patch = importlib.import_module("matplotlib.patches").Patch
    entries = [patch(color=REST.light, label="resident")]
    entries += [
        patch(color=ACTION_SHADES[action].light, label=_WORDS[action])
        for action in (None, *_ORDER)
        if action in actions
    ]
    entries.append(patch(color=REST_SPIKES.light, label="gradients, workspaces"))
    if has_line:
        entries.append(importlib.import_module("matplotlib.lines").Line2D([], [], color=INK.light, label="as run"))
    largest, outlined = named
    letters = 38 if shape.is_narrow else 110
    lines = []
    for number, index in enumerate(largest, start=1):
        size = format_bytes(recording.lifetimes[index].nbytes)
        mark = f"{number}:" if number in outlined else "-"
        text = f"{mark} {size}, {_WORDS[actions[index]]}: {storage_name(recording, index)}"
        lines += textwrap.wrap(text, letters, subsequent_indent="    ", max_lines=2, placeholder="...")
    legend = figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=2 if shape.is_narrow else len(entries),
        alignment="left",
        handlelength=1,
        columnspacing=1.2,
        borderaxespad=0,
    )
    legend.set_title("\n".join(lines), prop={"size": FONT_POINTS})
    legend.get_title().set_color(INK.light)


# Draws memory over one step twice in one panel: with everything kept, and as vdnn ran it under its budget.
#
# The page of a run with few cells begins with this figure. memory_over_step.py has the same step in detail, in layers.

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
