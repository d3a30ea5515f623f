"""The table of published rows and their virtual steps, from the figures alone, and what it says of vdnn."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.peers.published import optimizer_offload
from benchmarks.peers.published.reproduced import Figures, VdnnStep, place_key
from benchmarks.peers.published.rows import AFTER_TRUNK, GROWTH, MISSING, PEAK, ROWS, Row
from benchmarks.peers.published.virtual_step import VirtualStep
from benchmarks.text_table import render_table

_EVEN = 1.0005  # steps that differ by less take equally long
_FAR = 1.25  # a ratio that is off by more than this has its reason below the table
_NONE = ""
VDNN = "vdnn, at the least of these peaks"


def render(figures: Figures) -> str:
    header = ("row", "ms", "virtual", "ratio", "GB", "virtual", "ratio", "over base", "virtual", "ratio", "why")
    notes: dict[str, int] = {}
    lines = [line for place in _places(figures) for line in _lines_of(place, figures, notes)]
    remarks = [
        "Ratios are virtual over published. GB of axolotl#3776 are the growth over the model, of transformers what is "
        "there between trunk and loss beside the model; others are peaks. A base is a row of the same table: gc, "
        "plain, and for torchtune the chunked cross entropy or checkpointing. vdnn's rows have the least peak of the "
        "ways above them, and its time over that of the fastest of them that saves memory.",
        *_summary(figures),
        *_vdnn_summary(figures),
        *(f"{number}) {note}." for note, number in notes.items()),
    ]
    parts = [
        render_table("Published steps of peers, and the same in virtual time", header, lines, remarks),
        _offload_table(),
        "\n".join(["Published, and not reproduced, because a fact is missing:", *map(_missing_line, MISSING)]),
    ]
    return "\n\n".join(parts)


def _missing_line(missing: tuple[str, str]) -> str:
    return f"* {missing[0]}: {missing[1]}"


def known(figures: Figures) -> list[Row]:
    return [row for row in ROWS if figures.step_of(row) is not None]


def _places(figures: Figures) -> list[list[Row]]:
    """The rows by their training and card, in the order of ROWS."""
    places: dict[str, list[Row]] = {}
    for row in known(figures):
        places.setdefault(place_key(row.training, row.card), []).append(row)
    return list(places.values())


def _lines_of(rows: Sequence[Row], figures: Figures, notes: dict[str, int]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        time, memory, over = time_ratio(row, figures), memory_ratio(row, figures), base_ratio(row, figures)
        is_far = any(ratio is not None and max(ratio, 1 / ratio) > _FAR for ratio in (time, memory, over))
        why = str(notes.setdefault(row.why, len(notes) + 1)) if is_far and row.why else _NONE
        step = _step(row, figures)
        yield (
            row.key,
            *(_NONE if row.step_ms is None else f"{row.step_ms:,.0f}", f"{step.step_ns / 1e6:,.0f}", _ratio(time)),
            *_memory_columns(row, figures, memory),
            *_over_columns(row, figures, over),
            why,
        )
    vdnn = figures.vdnn_of(rows[0])
    if vdnn is not None:
        yield _vdnn_line(rows, vdnn, figures)


def _vdnn_line(rows: Sequence[Row], vdnn: VdnnStep, figures: Figures) -> tuple[str, ...]:
    growth = rows[0].memory == GROWTH
    held = vdnn.budget_bytes - (_step(rows[0], figures).before_bytes if growth else 0)
    took, over = "needs more", _NONE
    if vdnn.step_ns is not None:
        took = f"{vdnn.step_ns / 1e6:,.0f}"
        over = f"{vdnn.step_ns / _step(_fastest(rows, figures), figures).step_ns:.3f}"
    return (f"    {VDNN}", _NONE, took, _NONE, _NONE, f"{held / 1e9:.2f}", _NONE, _NONE, over, _NONE, _NONE)


def _fastest(rows: Sequence[Row], figures: Figures) -> Row:
    """The fastest way that saves memory, if there is one. With the memory of a plain step, vdnn keeps everything."""
    saving = [row for row in rows if row.way != "plain"] or rows
    return min(saving, key=lambda row: _step(row, figures).step_ns)


def _memory_columns(row: Row, figures: Figures, ratio: float | None) -> tuple[str, str, str]:
    if row.memory_bytes is None:
        return _NONE, _NONE, _NONE
    return f"{row.memory_bytes / 1e9:.2f}", f"{_memory(row, figures) / 1e9:.2f}", _ratio(ratio)


def _over_columns(row: Row, figures: Figures, ratio: float | None) -> tuple[str, str, str]:
    published, virtual = _published_over_base(row), _virtual_over_base(row, figures)
    if published is None or virtual is None:
        return _NONE, _NONE, _NONE
    return f"{published:.3f}", f"{virtual:.3f}", _ratio(ratio)


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}"


def row_named(key: str) -> Row:
    return next(row for row in ROWS if row.key == key)


def _step(row: Row, figures: Figures) -> VirtualStep:
    step = figures.step_of(row)
    if step is None:
        raise KeyError(row.key)
    return step


def _memory(row: Row, figures: Figures) -> int:
    step = _step(row, figures)
    return {
        PEAK: step.peak_bytes,
        GROWTH: step.peak_bytes - step.before_bytes,
        AFTER_TRUNK: step.forward_bytes - step.before_bytes,
    }[row.memory]


def time_ratio(row: Row, figures: Figures) -> float | None:
    return None if row.step_ms is None else _step(row, figures).step_ns / 1e6 / row.step_ms


def memory_ratio(row: Row, figures: Figures) -> float | None:
    return None if row.memory_bytes is None else _memory(row, figures) / row.memory_bytes


def base_ratio(row: Row, figures: Figures) -> float | None:
    published, virtual = _published_over_base(row), _virtual_over_base(row, figures)
    return None if published is None or virtual is None else virtual / published


def _published_over_base(row: Row) -> float | None:
    if row.over_base is not None or not row.base:
        return row.over_base
    base = row_named(row.base)
    return None if row.step_ms is None or base.step_ms is None else row.step_ms / base.step_ms


def _virtual_over_base(row: Row, figures: Figures) -> float | None:
    base = row_named(row.base) if row.base else None
    if base is None or figures.step_of(base) is None:
        return None
    return _step(row, figures).step_ns / _step(base, figures).step_ns


def ratios(row: Row, figures: Figures) -> list[float]:
    found = (time_ratio(row, figures), memory_ratio(row, figures), base_ratio(row, figures))
    return [ratio for ratio in found if ratio is not None]


def off_by(found: Iterable[float | None]) -> tuple[int, float, float]:
    """How many there are, and by which factor the median one and the worst one are off."""
    off = [max(ratio, 1 / ratio) for ratio in found if ratio is not None]
    return len(off), statistics.median(off), max(off)


def compared(figures: Figures) -> int:
    """How many published rows have a ratio, those of the optimizer's offload included."""
    return sum(bool(ratios(row, figures)) for row in known(figures)) + len(optimizer_offload.ROWS)


def said(figures: Figures) -> Iterator[str]:
    """The sentences of docs/benchmarks.md about the figures."""
    rows = known(figures)
    yield f"{compared(figures)} published rows have a virtual step beside them"
    for name, ratio in (("Memory is", memory_ratio), ("Times are", time_ratio), ("times over the base", base_ratio)):
        count, median, worst = off_by(ratio(row, figures) for row in rows)
        yield f"{name} off by {median:.2f} x in the median of {count} rows, {worst:.2f} x at worst"
    beside = [
        vdnn.step_ns / _step(_fastest(place, figures), figures).step_ns
        for place in _places(figures)
        if (vdnn := figures.vdnn_of(place[0])) is not None and vdnn.step_ns is not None
        if _fastest(place, figures).way != "plain"
    ]
    yield f"In {len(beside)} trainings vdnn takes {min(beside):.2f} to {max(beside):.2f} of the time of the fastest way"


def _summary(figures: Figures) -> Iterator[str]:
    rows = known(figures)
    yield f"{compared(figures)} published rows have a ratio, those of the next table included."
    for name, ratio in (("Times", time_ratio), ("Memory", memory_ratio), ("Times over the base", base_ratio)):
        found = [one for one in (ratio(row, figures) for row in rows) if one is not None]
        if found:
            count, median, worst = off_by(found)
            yield f"{name}: median off by {median:.2f} x, worst {worst:.2f} x, of {count} rows."


def slower_places(figures: Figures) -> list[str]:
    """Trainings in which a way that saves memory has a shorter step than vdnn."""
    slower = []
    for rows in _places(figures):
        vdnn = figures.vdnn_of(rows[0])
        if vdnn is None:
            continue
        fastest = _fastest(rows, figures)
        step_ns = _step(fastest, figures).step_ns
        if vdnn.step_ns is None or vdnn.step_ns > step_ns * _EVEN:
            peak = _step(fastest, figures).peak_bytes / vdnn.budget_bytes
            took = "needs more memory" if vdnn.step_ns is None else f"takes {vdnn.step_ns / step_ns:.3f} of it"
            slower.append(f"{fastest.key} has {peak:.2f} of vdnn's peak, and vdnn {took}")
    return slower


def _vdnn_summary(figures: Figures) -> Iterator[str]:
    places = [rows for rows in _places(figures) if figures.vdnn_of(rows[0]) is not None]
    if not places:
        return
    slower = slower_places(figures)
    yield (
        f"At the least peak of the ways of each of {len(places)} trainings, vdnn is slower than the fastest of those "
        f"that save memory in {len(slower)}{': ' * bool(slower)}{'; '.join(slower)}."
    )


def _offload_table() -> str:
    header = ("share of the optimizer", "ms", "virtual", "ratio", "GB saved", "virtual", "ratio", "vdnn ms", "GB")
    lines = []
    for row in optimizer_offload.ROWS:
        virtual, saved = optimizer_offload.bridge_ms(row), optimizer_offload.saved_bytes(row) / 1e9
        vdnn = optimizer_offload.vdnn_step(row)
        lines.append(
            (
                f"{row.share:.0%}{', copies beside the step' if row.overlaps else ''}",
                *(f"{row.step_ms:,.0f}", f"{virtual:,.0f}", f"{virtual / row.step_ms:.2f}"),
                *(f"{row.saved_gb:.1f}", f"{saved:.2f}", f"{saved / row.saved_gb:.2f}"),
                *(f"{vdnn.step_ns / 1e6:,.0f}", f"{(optimizer_offload.BASE_BYTES - vdnn.peak_bytes) / 1e9:.2f}"),
            )
        )
    remarks = [
        f"{optimizer_offload.SOURCE}. Without offload, {optimizer_offload.BASE_MS:.0f} ms as published, of which every "
        f"virtual step is made. Virtual times are too short: {optimizer_offload.WHY}. vdnn's last column is what it "
        "saves: at all of the optimizer, a slice of the state is on the card while it steps."
    ]
    title = "Megatron-Bridge, Qwen3-30B-A3B on 16 H100s: the optimizer on the host"
    return render_table(title, header, lines, remarks)
