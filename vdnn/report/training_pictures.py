"""Draws the plan of a whole training: memory by class over the cycle, and when each resource was busy.

The cycle begins with the first forward. Tasks of the device are drawn at the times at which they ran; the host's memory
is drawn by the share of its rate that copies and steps on the CPU take.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.report.drawing import Picture, Shape, quiet_axes, set_title, time_label, unit_for
from vdnn.report.file_names import file_name
from vdnn.report.palette import (
    BLUE,
    GREEN,
    GRID,
    ORANGE,
    PURPLE,
    REST,
    REST_SPIKES,
    SKY,
    VERMILION,
    Shade,
)
from vdnn.report.training_report import BusySpan, TrainingReport

_LAYERS: tuple[tuple[str, str, Shade], ...] = (
    ("transient_bytes", "fixed, transients", REST),
    ("parameter_bytes", "parameters", BLUE),
    ("gradient_bytes", "gradients", ORANGE),
    ("state_bytes", "optimizer state", PURPLE),
    ("activation_bytes", "activations", GREEN),
    ("moving_bytes", "on their way", SKY),
)
_ROWS = (("device", "compute"), ("to device", "to device"), ("to host", "to host"), ("cpu", "CPU"))
_COLUMNS = {"wide": 700, "narrow": 260}


def training_pictures(report: TrainingReport) -> tuple[Picture, Picture]:
    """Memory by class over the cycle, and the timeline of one step."""
    batch = "" if report.batch is None else f", batch {report.batch}"
    workload = report.model.rpartition(":")[2]
    title = f"{workload}{batch} on {report.hardware}"
    name = file_name(f"{workload}-{report.batch or ''}-{report.hardware}")
    return (
        Picture(
            name=f"training-memory-{name}",
            title="Memory by class over one cycle",
            described=f"Bytes on the device over one cycle of {title}, by class, under a budget of "
            f"{format_bytes(report.budget_bytes)}.",
            workload=workload,
            draw=lambda figure, shape: _draw_memory(figure, shape, report, title),
            height=lambda shape: 4.0 if not shape.is_narrow else 5.0,
        ),
        Picture(
            name=f"training-timeline-{name}",
            title="What each resource did in one step",
            described=f"One step of {title}: computing, copies in both directions, the host's memory and its cores.",
            workload=workload,
            draw=lambda figure, shape: _draw_timeline(figure, shape, report, title),
            height=lambda shape: 3.4 if not shape.is_narrow else 4.2,
        ),
    )


def _draw_memory(figure: Any, shape: Shape, report: TrainingReport, title: str) -> None:
    axes = figure.subplots()
    unit, unit_bytes = unit_for(max(report.peak_bytes, report.budget_bytes))
    begins, ends = _task_times(report)
    lower = [0.0] * len(report.memory)
    patches = []
    patch = importlib.import_module("matplotlib.patches").Patch
    for field, word, shade in _LAYERS:
        heights = [getattr(one, field) / unit_bytes for one in report.memory]
        if not any(heights):
            continue
        upper = [below + height for below, height in zip(lower, heights, strict=True)]
        edges = [*begins, ends[-1] if ends else 0.0]
        axes.fill_between(
            edges,
            [*lower, lower[-1]],
            [*upper, upper[-1]],
            step="post",
            facecolor=shade.light,
            linewidth=0,
        )
        patches.append(patch(facecolor=shade.light, label=word))
        lower = upper
    axes.axhline(report.budget_bytes / unit_bytes, color=VERMILION.light, linewidth=1.2)
    axes.text(
        0.99 * report.step_ns / 1e6,
        report.budget_bytes / unit_bytes,
        f"budget {format_bytes(report.budget_bytes)}",
        ha="right",
        va="bottom",
        color=VERMILION.light,
    )
    quiet_axes(axes)
    axes.set_xlim(0, 1.02 * report.step_ns / 1e6)
    axes.set_ylim(0, 1.12 * max(report.peak_bytes, report.budget_bytes) / unit_bytes)
    axes.set_ylabel(f"on the device ({unit})")
    axes.set_xlabel(time_label(shape, "virtual"))
    _legend(figure, shape, patches)
    set_title(figure, shape, title)


def _task_times(report: TrainingReport) -> tuple[list[float], list[float]]:
    """For each task, when it began and ended, in ms. A task's memory is there until the next one begins."""
    tasks = sorted((one for one in report.spans if one.row == "device"), key=lambda one: one.begin_ns)
    count = len(report.memory)
    found = tasks[-count:]
    if len(found) < count:  # a step that was not simulated with its spans: tasks of equal length
        width = report.step_ns / 1e6 / max(1, count)
        return [width * index for index in range(count)], [width * (index + 1) for index in range(count)]
    return [0.0, *(one.begin_ns / 1e6 for one in found[1:])], [one.end_ns / 1e6 for one in found]


def _draw_timeline(figure: Any, shape: Shape, report: TrainingReport, title: str) -> None:
    axes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1.6))
    least = report.step_ns / _COLUMNS[shape.name]
    shown = [(row, word) for row, word in _ROWS if row != "cpu" or report.cpu_step_bytes]
    for place, (row, _) in enumerate(shown):
        spans = [one for one in report.spans if one.row == row]
        for shade, part in _by_shade(row, spans):
            joined = _joined(part, least)
            axes.broken_barh(
                [(begin / 1e6, (end - begin) / 1e6) for begin, end in joined],
                (place - 0.36, 0.72),
                facecolors=shade.light,
                linewidth=0,
            )
    axes.set_yticks(range(len(shown)), [word for _, word in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID.light, linewidth=0.8)
    edges, shares = dram_shares(report, _COLUMNS[shape.name] // 3)
    memory.fill_between(edges, [*shares, shares[-1]], step="post", facecolor=ORANGE.light, linewidth=0)
    quiet_axes(memory)
    memory.set_ylim(0, 105)
    memory.set_yticks([0, 100], ["0", "100 %"])
    memory.set_ylabel("DRAM")
    memory.set_xlim(0, 1.02 * report.step_ns / 1e6)
    memory.set_xlabel(time_label(shape, "virtual"))
    patch = importlib.import_module("matplotlib.patches").Patch
    entries = [
        patch(facecolor=REST.light, label="forward"),
        patch(facecolor=REST_SPIKES.light, label="backward"),
        patch(facecolor=PURPLE.light, label="optimizer"),
        patch(facecolor=BLUE.light, label="copies"),
        patch(facecolor=ORANGE.light, label="host's memory, of its rate"),
    ]
    _legend(figure, shape, entries)
    set_title(figure, shape, title)


def dram_shares(report: TrainingReport, columns: int) -> tuple[list[float], list[float]]:
    """The edges of `columns` equal parts of the step, in ms, and the share of the host's memory rate in each, in
    percent."""
    width = max(1.0, report.step_ns / columns)
    moved = [0.0] * columns
    for one in report.spans:
        if not one.memory_bytes or one.end_ns <= one.begin_ns:
            continue
        rate = one.memory_bytes / (one.end_ns - one.begin_ns)
        first, last = max(0, int(one.begin_ns / width)), min(columns - 1, int(one.end_ns / width))
        for column in range(first, last + 1):
            inside = min(one.end_ns, (column + 1) * width) - max(one.begin_ns, column * width)
            moved[column] += rate * max(0.0, inside)
    room = report.host_bytes_per_s / 1e9 * width
    return [width * index / 1e6 for index in range(columns + 1)], [min(100.0, 100 * one / room) for one in moved]


def _by_shade(row: str, spans: list[BusySpan]) -> list[tuple[Shade, list[BusySpan]]]:
    if row == "cpu":
        return [(PURPLE, spans)]
    if row != "device":
        return [(BLUE, spans)]
    kinds = (("forward", REST), ("backward", REST_SPIKES), ("step", PURPLE))
    return [(shade, [one for one in spans if one.name.startswith(kind)]) for kind, shade in kinds]


def _joined(spans: Iterable[BusySpan], gap_ns: float) -> list[tuple[float, float]]:
    """Spans in order; those that are less than `gap_ns` apart are joined."""
    joined: list[tuple[float, float]] = []
    for one in sorted(spans, key=lambda one: one.begin_ns):
        begin, end = float(max(0, one.begin_ns)), float(one.end_ns)
        if joined and begin - joined[-1][1] < gap_ns:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > begin:
            joined.append((begin, end))
    return joined


def _legend(figure: Any, shape: Shape, entries: list[Any]) -> None:
    figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=2 if shape.is_narrow else 6,
        alignment="left",
        handlelength=1.4,
        columnspacing=1.2,
        borderaxespad=0,
    )
