"""Tables of the page: sortable, each in a box that scrolls by itself. This module escapes all text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from vdnn.bytesize import format_bytes
from vdnn.report.cell import Cell
from vdnn.report.comparison import Comparison
from vdnn.report.storage_table import StorageRow


class Entry(NamedTuple):
    """The text of one cell of a table, and the value that it is sorted by. "" comes last."""

    text: str
    value: str | float = ""


@dataclass(frozen=True, slots=True)
class Column:
    """`kind`: "number", "amounts" (one per line), "short" (never wrapped), "wrapped", "name", "long", "remark"."""

    title: str
    kind: str


@dataclass(frozen=True, slots=True)
class Row:
    entries: tuple[Entry, ...]
    workload: str | None = None
    is_own: bool = False


def table(columns: Sequence[Column], rows: Sequence[Row], label: str, *, kind: str = "box") -> str:
    head = "".join(
        f'<th scope="col" class="{column.kind}" aria-sort="none">'
        f'<button type="button">{escape(column.title)}</button></th>'
        for column in columns
    )
    body = "".join(_row(columns, row) for row in rows)
    return (
        f'<div class="{kind}" role="region" tabindex="0" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(columns: Sequence[Column], row: Row) -> str:
    attributes = "" if row.workload is None else f' data-workload="{escape(row.workload)}"'
    attributes += ' class="own"' if row.is_own else ""
    cells = "".join(
        f'<td class="{column.kind}" data-value="{escape(str(entry.value))}">{escape(entry.text)}</td>'
        for column, entry in zip(columns, row.entries, strict=True)
    )
    return f"<tr{attributes}>{cells}</tr>"


def words(text: str | None) -> Entry:
    return Entry(text or "", text or "")


def size(nbytes: int | None) -> Entry:
    return Entry("") if nbytes is None else Entry(format_bytes(nbytes), nbytes)


def milliseconds(time_ns: int | None, digits: int = 1) -> Entry:
    return Entry("") if time_ns is None else Entry(f"{time_ns / 1e6:.{digits}f} ms", time_ns)


def percent(part: float | None, *, signed: bool = False, of: str = "") -> Entry:
    return Entry("") if part is None else Entry(f"{of}{100 * part:{'+' if signed else ''}.1f} %", round(part, 9))


def _amounts(first: Entry, second: Entry) -> Entry:
    """Two amounts in one place, one below the other, sorted by the first."""
    return Entry("\n".join(one.text for one in (first, second) if one.text), first.value)


_CELL_COLUMNS = (
    Column("workload", "name"),
    Column("peer", "name"),
    Column("budget", "wrapped"),
    Column("of plain", "number"),
    Column("more time", "number"),
    Column("peak", "number"),
    Column("step", "number"),
    Column("stall", "number"),
    Column("offloaded, reloaded", "amounts"),
    Column("off the prediction", "amounts"),
    Column("same gradients", "short"),
    Column("device", "wrapped"),
    Column("remark", "remark"),
)
_ALWAYS = ("workload", "peer", "remark")


def cells_table(compared: Sequence[Comparison]) -> str:
    """A column that is empty in all rows is left out, and so is the device if all rows have the same."""
    rows = [_cell_row(comparison, cell) for comparison in compared for cell in comparison.in_order]
    same_device = len({one.where for one in compared}) == 1
    shown = [
        index
        for index, column in enumerate(_CELL_COLUMNS)
        if column.title in _ALWAYS
        or (any(row.entries[index].text for row in rows) and not (column.title == "device" and same_device))
    ]
    narrowed = [Row(tuple(row.entries[index] for index in shown), row.workload, row.is_own) for row in rows]
    return table([_CELL_COLUMNS[index] for index in shown], narrowed, "all rows of the run", kind="box full")


def _cell_row(comparison: Comparison, cell: Cell) -> Row:
    same = "" if cell.identical is None else "yes" if cell.identical else "NO"
    ended = "" if cell.status == "ok" else cell.status.replace("-", " ")
    entries = (
        words(comparison.name),
        words(cell.peer),
        Entry(cell.budget_text, cell.budget_bytes or cell.budget or ""),
        percent(comparison.memory_share(cell)),
        percent(comparison.more_time(cell), signed=True),
        size(cell.peak_bytes),
        milliseconds(cell.step_ns),
        milliseconds(cell.stall_ns),
        _amounts(size(cell.to_host_bytes), size(cell.to_device_bytes)),
        _amounts(
            percent(_error(cell.step_ns, cell.predicted_step_ns), signed=True, of="step "),
            percent(_error(cell.peak_bytes, cell.predicted_peak_bytes), signed=True, of="peak "),
        ),
        words(same),
        words(comparison.where),
        words(": ".join(part for part in (ended, cell.said) if part)),
    )
    return Row(entries, cell.workload, cell.is_vdnn)


def _error(measured: int | None, predicted: int | None) -> float | None:
    return None if not measured or not predicted else measured / predicted - 1


_STORAGE_COLUMNS = (
    Column("storage", "long"),
    Column("bytes", "number"),
    Column("action", "short"),
    Column("why", "remark"),
    Column("copy time", "number"),
    Column("stall", "number"),
    Column("recompute time", "number"),
    Column("shape", "wrapped"),
)


def storages_table(rows: Sequence[StorageRow], label: str) -> str:
    made = [
        Row(
            (
                words(row.name),
                size(row.nbytes),
                words("" if row.action is None else row.action.value),
                words(row.why),
                milliseconds(row.copy_ns, 2),
                milliseconds(row.waited_ns, 2),
                milliseconds(row.recompute_ns, 2),
                words(row.shape),
            )
        )
        for row in rows
    ]
    return table(_STORAGE_COLUMNS, made, label)
