"""The report as plain text: the headline, a table for each comparison, the steps, the sources and the missing parts."""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.bytesize import format_bytes
from vdnn.report.cell import Cell
from vdnn.report.comparison import Comparison, cells_of_run, comparisons
from vdnn.report.headline import headline, named_points
from vdnn.report.plan_text import aligned
from vdnn.report.prediction import errors_text, peaks_of, times_of
from vdnn.report.provenance import provenance
from vdnn.report.run_folder import Run
from vdnn.report.step_timeline import shown_timelines, summary_of

_HEADER = ("peer", "budget", "peak", "of plain", "step", "more time", "stall", "status")


def text_summary(run: Run) -> str:
    """The text of the report. It ends with a line break."""
    compared, cells = comparisons(run), cells_of_run(run)
    found = named_points(compared)
    parts = [headline(compared)]
    if len(found) > 1:
        parts.append("\n".join(f"  {one}" for one in found))
    parts += [_table(comparison) for comparison in compared]
    predicted = ((times_of(cells), "step times"), (peaks_of(cells), "peaks"))
    said = [errors_text(both, what) for both, what in predicted if both]
    if said:
        parts.append("\n".join(["prediction against measurement:", *(f"  {one}" for one in said)]))
    if run.steps:
        parts.append("\n".join(["steps:", *_steps(run)]))
    parts += [str(one) for one in run.trainings]
    parts.append("\n".join(f"{name}: {text}" for name, text in provenance(run)))
    if run.notes:
        parts.append("\n".join(run.notes))
    return _printable("\n\n".join(parts)) + "\n"


def _table(comparison: Comparison) -> str:
    rows = [_HEADER, *(_row(comparison, cell) for cell in comparison.in_order)]
    return f"{comparison.name} on {comparison.where}\n{aligned(rows, left=(0, len(_HEADER) - 1), indent='  ')}"


def _row(comparison: Comparison, cell: Cell) -> Sequence[str]:
    share, more = comparison.memory_share(cell), comparison.more_time(cell)
    ended = cell.status.replace("-", " ")
    return (
        cell.peer,
        cell.budget or "",
        "" if not cell.peak_bytes else format_bytes(cell.peak_bytes),
        "" if share is None else f"{100 * share:.1f} %",
        "" if not cell.step_ns else f"{cell.step_ns / 1e6:.1f} ms",
        "" if more is None else f"{100 * more:+.1f} %",
        "" if cell.stall_ns is None else f"{cell.stall_ns / 1e6:.1f} ms",
        f"{ended}: {cell.said}" if cell.said else ended,
    )


def _steps(run: Run) -> list[str]:
    lines = []
    for step in run.steps:
        shown = "; ".join(summary_of(one) for one in shown_timelines(step)) or "no timeline"
        lines.append(f"  {step.name}: {shown}")
        lines += [] if step.plan_use is None else [f"    {line}" for line in step.plan_use.lines()]
    return lines


def _printable(text: str) -> str:
    """Replace letters that are not printable: a name may contain control sequences for the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
